"""A comparison of runs on a terminal."""

from __future__ import annotations

from string import ascii_lowercase

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_core.config import show
from rl_launch.show.comparison import MAX_NAMED, RunComparison
from rl_launch.show.report import higher_is_better
from rl_launch.show.terminal import GAP, MAX_PLOTS, PLOTTED, WIDEST, Curve, overlay, reward_parts, side_by_side

COLORS = ("green", "magenta", "cyan", "yellow", "blue", "red")
"""Colors of the curves, in turn."""

MAX_CURVES = 12
"""Maximum number of curves in one plot."""

_REWARDS = ("reward/mean", "val/reward", "val/accuracy")
_OF_UPDATES = ("policy/nll", "train/loss")


def show_comparison(comparison: RunComparison, console: Console) -> None:
    """Print a comparison: its groups, their curves in one plot per metric, and a table per metric."""
    width = min(console.width, WIDEST)
    num_runs = sum(len(group.paths) for group in comparison.groups)
    console.print(_heading(comparison, num_runs), style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print()
    table = _table("", "group", "runs")
    for index, group in enumerate(comparison.groups):
        runs = []
        for path, seeds in zip(group.paths, group.seeds, strict=True):
            runs.append(f"{path} (seed {' '.join(map(show, seeds.values()))})" if seeds else path)
        table.add_row(Text(letter(index), style=COLORS[index % len(COLORS)]), group.name, ", ".join(runs))
    console.print(table, width=width)
    if len(comparison.keys) > MAX_NAMED:
        console.print()
        table = _table("key", *(letter(index) for index in range(len(comparison.groups))))
        for key in comparison.keys:
            table.add_row(key, *(show(group.values[key]) for group in comparison.groups))
        console.print(table, width=width)
    metrics = compared_metrics(comparison)
    if not metrics:
        console.print("\nNo steps are recorded yet. Use rl runs to show the state of each run.", highlight=False)
        return
    console.print()
    drawn = []
    for name in metrics:
        curves = [
            Curve(group.series[name], letter(index)[-1], COLORS[index % len(COLORS)])
            for index, group in enumerate(comparison.groups[:MAX_CURVES])
            if group.series.get(name)
        ]
        if any(len(group.series.get(name, ())) > 1 for group in comparison.groups):
            drawn.append(overlay(name, curves, width=(width - GAP) // 2))
    for line in side_by_side(drawn):
        console.print(line, no_wrap=True, overflow="crop")
    if len(comparison.groups) > MAX_CURVES:
        console.print(f"Curves of the first {MAX_CURVES} groups.", highlight=False)
    for name in metrics:
        console.print()
        console.print(_metric(comparison, name), width=width)


def compared_metrics(comparison: RunComparison) -> list[str]:
    """Return the metrics to show, most important first. Runs with rewards are compared by all parts of the reward, and
    not by their losses, which say nothing about which is better.
    """
    found = dict.fromkeys(name for group in comparison.groups for name in group.series)
    parts = reward_parts(found)
    left_out = _OF_UPDATES if "reward/mean" in found else ()
    metrics = [name for name in PLOTTED if name in found and name not in left_out][:MAX_PLOTS]
    place = sum(name in _REWARDS for name in metrics)
    return [*metrics[:place], *parts, *metrics[place:]]


def letter(index: int) -> str:
    """Return the letter of a group: `a`, `b`, ..., `z`, `aa`, ..."""
    high, low = divmod(index, len(ascii_lowercase))
    return (letter(high - 1) if high else "") + ascii_lowercase[low]


def _heading(comparison: RunComparison, num_runs: int) -> str:
    if not comparison.keys and not comparison.seeds:
        return f"{num_runs} runs with equal configs"
    if not comparison.keys:
        return f"{num_runs} runs that differ only in {' and '.join(comparison.seeds)}"
    over = f", over {' and '.join(comparison.seeds)}" if comparison.seeds else ""
    if len(comparison.keys) > MAX_NAMED:
        return f"{num_runs} runs that differ in {len(comparison.keys)} keys{over}"
    return f"{num_runs} runs that differ in {' and '.join(comparison.keys)}{over}"


def _metric(comparison: RunComparison, name: str) -> Table:
    """Return the groups by one metric, the best first."""
    higher = higher_is_better(name, {each for group in comparison.groups for each in group.series})
    table = _table("", name, "last", *(["best"] if higher is not None else []))
    groups = enumerate(comparison.groups)
    found = [(index, group, *group.metrics[name]) for index, group in groups if name in group.metrics]
    if higher is not None:
        found.sort(key=lambda each: (-1 if higher else 1) * (each[3] or each[2]).mean)
    for place, (index, group, last, best) in enumerate(found):
        style = "bold" if higher is not None and not place and len(found) > 1 else ""
        cells = [str(last), *([str(best or "")] if higher is not None else [])]
        table.add_row(Text(letter(index), style=COLORS[index % len(COLORS)]), group.name, *cells, style=style)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("last", "best") else "left", no_wrap=not place
        )
    return table
