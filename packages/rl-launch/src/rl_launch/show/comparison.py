"""Several training runs side by side: their different keys, and their metrics, over seeds if there are several; and
the same on a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from string import ascii_lowercase
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_core.config import show
from rl_core.config.tree import KeyPath, format_path
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import SECTION as LABELS
from rl_launch.show.report import MetricSummary, Series, headings, higher_is_better, series_of, summaries_of
from rl_launch.show.terminal import GAP, MAX_PLOTS, PLOTTED, WIDEST, Curve, overlay, reward_parts, side_by_side

SEED = "seed"
"""Last name of the keys that seed random numbers."""

MAX_NAMED = 4
"""Maximum number of keys in the name of a group; with more, groups have the name of their first run."""

_WITHOUT_EFFECT = ("run_dir", LABELS)
"""Keys and sections that do not change how a run trains."""


@dataclass(frozen=True)
class RunEstimate:
    """A value over the runs of a group.

    Args:
        mean: Mean over the runs that have it.
        std: Standard deviation of the sample; None for one run.
        num_runs: Number of runs that have it.
    """

    mean: float
    std: float | None
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> RunEstimate:
        """Return the estimate from the value of each run."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + ("" if self.std is None else f" ± {self.std:.2g}")


@dataclass(frozen=True)
class RunGroup:
    """Runs whose configs differ in seeds at most.

    Args:
        name: The values that tell it from the others, in words.
        values: Values of the keys that differ between groups; None for one that its runs do not have.
        paths: Folders of the runs.
        seeds: For each run, values of the seeds that differ.
        metrics: By name, the last value of each run, and the best; None for a metric without a better end.
        series: Mean over the runs of each metric, at every step that at least one of them recorded.
        members: Series of each run.
    """

    name: str
    values: Mapping[str, Any]
    paths: tuple[str, ...]
    seeds: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, tuple[RunEstimate, RunEstimate | None]]
    series: Series
    members: tuple[Series, ...]


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side.

    Args:
        keys: Keys that differ between the configs, except seeds, the folder and the keys of the logger.
        seeds: Seeds that differ.
        groups: In the order of their first runs.
    """

    keys: tuple[str, ...]
    seeds: tuple[str, ...]
    groups: tuple[RunGroup, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `rl show RUN RUN... --json` prints."""
        groups = [
            {
                "name": group.name,
                "values": dict(group.values),
                "runs": list(group.paths),
                "metrics": {
                    name: {"last": vars(last), "best": vars(best) if best else None}
                    for name, (last, best) in group.metrics.items()
                },
            }
            for group in self.groups
        ]
        return {"schema": 1, "keys": list(self.keys), "seeds": list(self.seeds), "groups": groups}


def comparison_of(runs: Sequence[RunFolder]) -> RunComparison:
    """Compare runs, finished or in progress."""
    configs = [effective_values(run.config()) for run in runs]
    differing = differing_keys(configs)
    seeds = tuple(key for key in differing if key.rpartition(".")[2] == SEED)
    keys = tuple(key for key in differing if key not in seeds)
    grouped: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        grouped.setdefault(repr([config.get(key, ...) for key in keys]), []).append(index)
    groups = [
        _group([runs[index] for index in members], [configs[index] for index in members], keys, seeds)
        for members in grouped.values()
    ]
    return RunComparison(keys, seeds, tuple(groups))


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that differ between some configs, in the order of the first config that has each.

    Args:
        configs: Values by dotted key, as `effective_values` returns them.
    """
    return [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if any(config.get(key, ...) != configs[0].get(key, ...) for config in configs)
    ]


def effective_values(config: Mapping[str, Any], above: KeyPath = ()) -> dict[str, Any]:
    """Return the values of a config that change how it trains, by dotted key; a list is one value.

    Args:
        config: The config as nested plain values.
        above: Section of these values.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value and (above or name not in _WITHOUT_EFFECT):
            found |= effective_values(value, (*above, name))
        elif above or name not in _WITHOUT_EFFECT:
            found[format_path((*above, name))] = value
    return found


def _group(
    runs: Sequence[RunFolder], configs: Sequence[Mapping[str, Any]], keys: Sequence[str], seeds: Sequence[str]
) -> RunGroup:
    members = [series_of(run.metrics()) for run in runs]
    summaries = [summary for each in members for summary in summaries_of(each)]
    by_metric: dict[str, list[MetricSummary]] = {}
    for summary in summaries:
        by_metric.setdefault(summary.name, []).append(summary)
    metrics = {}
    for name, found in by_metric.items():
        best = [summary.best for summary in found if summary.best is not None]
        last = RunEstimate.of([summary.last for summary in found])
        metrics[name] = last, RunEstimate.of(best) if best else None
    values = {key: configs[0].get(key) for key in keys}
    texts = [value if isinstance(value, str) else show(value) for value in values.values()]
    title = ", ".join(f"{heading} {text}" for heading, text in zip(headings(keys), texts, strict=True)) or "all"
    means = {}
    for name in dict.fromkeys(name for series in members for name in series):
        by_step: dict[int, list[float]] = {}
        for series in members:
            for step, value in series.get(name, ()):
                by_step.setdefault(step, []).append(value)
        means[name] = [(step, fmean(by_step[step])) for step in sorted(by_step)]
    return RunGroup(
        name=title if len(keys) <= MAX_NAMED else runs[0].path.name,
        values=values,
        paths=tuple(str(run.path) for run in runs),
        seeds=tuple({key: config.get(key) for key in seeds} for config in configs),
        metrics=metrics,
        series=means,
        members=tuple(members),
    )


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
