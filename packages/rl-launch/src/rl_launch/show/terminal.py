"""A report on a terminal, with charts in the dots of braille characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rl_launch.run_session.tracking.progress import duration
from rl_launch.show.report import MetricSummary, Rollouts, RolloutSample, RunReport, SampleSegment

# the bit of each dot of a braille character, by row and column
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_LABEL = 8

Points = Sequence[tuple[float, float]]
"""Steps in ascending order, each with a finite value."""


PLOTTED = (
    "reward/mean",
    "val/accuracy",
    "val/reward",
    "val/loss",
    "policy/nll",
    "train/loss",
    "policy/kl",
    "rollout/mean_length",
    "train/grad_norm",
)
"""Metrics to plot, most important first."""

MAX_PLOTS = 4

FIRST = ("reward/mean", "val/reward", "rollout/truncated", "policy/nll", "mismatch/mean")
"""Metrics to look at first, as docs/metrics.md lists them. The parts of the reward follow its mean."""

_WITHOUT_REWARDS = ("val/accuracy", "val/loss", "val/margin", "train/loss", "train/grad_norm")
"""Those of algorithms that have no rewards."""

_WHOLE_REWARD = ("reward/mean", "reward/std")

_MIXED = ("most mixed", "second most mixed")

GAP, WIDEST = 2, 120
"""Columns between two charts, and maximum number of columns of a report."""


@dataclass(frozen=True)
class Curve:
    """One of several curves in a chart.

    Args:
        points: At least one.
        mark: Character at its last point; empty for none.
        style: Style of its dots, in the words of `rich`.
    """

    points: Points
    mark: str = ""
    style: str = ""


def overlay(title: str, curves: Sequence[Curve], *, width: int, height: int = 7) -> list[Text]:
    """Draw curves over steps in one chart, with the range of all on the axes; the last curve covers the others.

    Args:
        title: The first line.
        curves: At least one.
        width: Characters of a line.
        height: Lines of the plot itself.

    Returns:
        `height + 2` lines of `width` characters.
    """
    columns = width - _LABEL - 1
    everything = [point for curve in curves for point in curve.points]
    steps, values = [step for step, _ in everything], [value for _, value in everything]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    across = (2 * columns - 1) / (last - first) if last > first else 0.0
    up = (4 * height - 1) / (high - low) if high > low else 0.0
    # A flat line is in the middle.
    bottom = 4 * height - 1 - (0 if high > low else 2 * height)
    dots = []
    for curve in curves:
        # A column shows the mean of its values.
        by_column: dict[int, list[float]] = {}
        for step, value in curve.points:
            by_column.setdefault(round((step - first) * across), []).append(value)
        dots.append(_line([(x, bottom - round((sum(each) / len(each) - low) * up)) for x, each in by_column.items()]))
    cells = [[_BLANK] * columns for _ in range(height)]
    for x, y in (dot for each in dots for dot in each):
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    rows = [Text("".join(map(chr, row))) for row in cells]
    for curve, found in zip(curves, dots, strict=True):
        for x, y in found:
            rows[y // 4].stylize(curve.style, x // 2, x // 2 + 1)
    for curve, found in zip(curves, dots, strict=True):
        if curve.mark:
            x, y = found[-1]
            row, at = rows[y // 4], x // 2
            rows[y // 4] = Text.assemble(row[:at], (curve.mark, f"bold {curve.style}"), row[at + 1 :])
    labels = [_label(high), *[""] * (height - 2), _label(low)]
    lines = [Text.assemble(f"{label:>{_LABEL}} ", row) for label, row in zip(labels, rows, strict=True)]
    begin, end = f"{first:g}", f"step {last:g}"
    axis = f"{'':{_LABEL}} {begin}{end:>{columns - len(begin)}}"
    return [Text(f"{'':{_LABEL}} {title}"[:width].ljust(width)), *lines, Text(axis)]


def _label(value: float) -> str:
    return next(text for digits in (4, 2, 1) if len(text := f"{value:.{digits}g}") <= _LABEL)


def _line(knots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the columns and rows, from the top left, of a line through some of them."""
    dots = list(knots[:1])
    for (x0, y0), (x1, y1) in pairwise(knots):
        length = max(x1 - x0, abs(y1 - y0))
        dots += [(round(x0 + (x1 - x0) * k / length), round(y0 + (y1 - y0) * k / length)) for k in range(1, length + 1)]
    return dots


def side_by_side(charts: Sequence[Sequence[Text]]) -> Iterator[Text]:
    """Yield the lines of charts of one height, two next to one another."""
    for place in range(0, len(charts), 2):
        for lines in zip(*charts[place : place + 2], strict=True):
            line = Text(" " * GAP).join(lines)
            line.rstrip()
            yield line


_PROMPT, _RESPONSE = 160, 320
_MAX_SEGMENTS, _MAX_MESSAGES, _MAX_VERDICTS = 8, 12, 6
"""Maximum number of segments of an agent's rollout that are printed, and of messages of each."""


def show(report: RunReport, console: Console, *, lists_all: bool = False) -> None:
    """Print a report, with no line wider than the console. If rollouts were requested, print only these.

    Args:
        report: The run.
        console: Where to print.
        lists_all: True for a table of all metrics rather than of the most important ones.
    """
    width = min(console.width, WIDEST)
    state, known = report.state, report.description
    steps = f"step {state.step}/{state.max_steps}" if state.max_steps else f"step {state.step}"
    progress = "  ".join(part for part in (known.algorithm, state.status, steps, state.reason) if part)
    saved = [f"saved {name} {path}" for name, path in report.exports.items()]
    for line in [report.path, progress, *([f"model {known.model}"] if known.model else []), *saved]:
        console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    if report.rollouts is not None and report.rollouts.were_asked_for:
        show_rollouts(report.rollouts, console)
        return
    if not report.series:
        log = "logs/error.log for the reason" if report.state.status == "failed" else "logs/driver.log for its progress"
        console.print(f"No steps are recorded. See {log}.", highlight=False)
        return
    console.print()
    drawn = [overlay(name, [Curve(report.series[name])], width=(width - GAP) // 2) for name in plotted(report)]
    for row in side_by_side(drawn):
        console.print(row, style="green", no_wrap=True, overflow="crop")
    console.print()
    _show_metrics(report, console, width, lists_all=lists_all)
    console.print()
    console.print(_times(report), width=width)
    if report.rollouts is not None:
        show_rollouts(report.rollouts, console)
    console.print("\nWhat to look at next", style="bold")
    for each in report.advice:
        console.print(_indented(Text(f"{each.found}."), 2), width=width)
        console.print(_indented(Text(f"{each.remedy}.", style="dim"), 6), width=width)
    if not report.advice:
        console.print("  No problems found.")


def plotted(report: RunReport) -> list[str]:
    """Return the metrics to plot: the first ones that have more than one value."""
    return [name for name in PLOTTED if len(report.series.get(name, ())) > 1][:MAX_PLOTS]


def reward_parts(metrics: Iterable[str]) -> list[str]:
    """Return the metrics of the named parts of the reward, of those given."""
    return [name for name in metrics if name.startswith("reward/") and name not in _WHOLE_REWARD]


def _show_metrics(report: RunReport, console: Console, width: int, *, lists_all: bool) -> None:
    found = [each for each in report.summaries if not (each.name.startswith("system/") and each.name.count("/") > 1)]
    first = _of((*FIRST, *_WITHOUT_REWARDS), found)
    listed = [*first, *(each for each in found if each not in first)]
    if lists_all:
        constant = [each for each in listed if all(value == each.first for _, value in report.series[each.name])]
        console.print(_metrics([each for each in listed if each not in constant]), width=width)
        if constant:
            values = ", ".join(f"{each.name} {each.first:.4g}" for each in constant)
            console.print(_indented(Text(f"constant: {values}", style="dim"), 0), width=width)
        return
    mean, *others = FIRST
    parts = reward_parts(report.series)
    shown = _of((mean, *parts, *others), listed) or _of(_WITHOUT_REWARDS, listed) or listed
    console.print(_metrics(shown), width=width)
    if rest := len(listed) - len(shown):
        console.print(_indented(Text(f"{rest} more metrics: rl show RUN --all", style="dim"), 0), width=width)


def _metrics(summaries: Sequence[MetricSummary]) -> Table:
    table = _table("metric", "first", "best", "at step", "last")
    for each in summaries:
        best = "" if each.best is None else f"{each.best:.4g}"
        step = "" if each.best_step is None else str(each.best_step)
        table.add_row(each.name, f"{each.first:.4g}", best, step, f"{each.last:.4g}")
    return table


def _of(names: Sequence[str], summaries: Sequence[MetricSummary]) -> list[MetricSummary]:
    return sorted((each for each in summaries if each.name in names), key=lambda each: names.index(each.name))


def _times(report: RunReport) -> Table:
    table = _table("phase", "time", "share")
    whole = report.timings.get("step", 0.0)
    phases = {name: seconds for name, seconds in report.timings.items() if name != "step"}
    for name, seconds in phases.items():
        table.add_row(name.replace("_", " "), duration(seconds), f"{seconds / whole:.0%}" if whole else "")
    rest = whole - sum(phases.values())
    if rest > 0.01 * whole:
        table.add_row("the rest", duration(rest), f"{rest / whole:.0%}" if whole else "")
    table.add_row("all steps", duration(whole), "")
    return table


def show_rollouts(rollouts: Rollouts, console: Console) -> None:
    """Print the rollouts of a step or of an evaluation that were asked for, or the best and the worst of some."""
    width = min(console.width, WIDEST)
    which = {"val": f"Validation rollouts after step {rollouts.step}", "eval": "Rollouts of the evaluation"}
    title = which.get(rollouts.kind, f"Rollouts of step {rollouts.step}")
    console.print(f"\n{title}: {rollouts.num_rollouts}", style="bold", highlight=False)
    if rollouts.chosen is not None:
        others = f", {len(rollouts.chosen)} shown" if rollouts.chosen else ""
        if not rollouts.chosen and rollouts.kind != "eval":
            others = "; --step N selects from another step"
        console.print(f"  {rollouts.num_chosen} selected{others}", highlight=False)
        titled = [("", sample) for sample in rollouts.chosen]
    elif rollouts.are_mixed:
        groups = zip(_MIXED, rollouts.best, rollouts.worst, strict=False)
        titled = [
            (f"{which} of the {group} group: ", sample)
            for group, *both in groups
            for which, sample in zip(("best", "worst"), both, strict=True)
        ]
    else:
        titled = [("highest ", sample) for sample in rollouts.best] + [("lowest ", sample) for sample in rollouts.worst]
    for title, sample in titled:
        console.print(_indented(_sampled(title, sample), 2), width=width)
    for reason, count in rollouts.failures.items() if rollouts.chosen is None else ():
        text = Text.assemble((f"{count} failed: ", "red"), shortened(reason, _RESPONSE))
        console.print(_indented(text, 2), width=width)


def _sampled(title: str, sample: RolloutSample) -> Text:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample.parts.items())
    reward = "failed" if sample.reward is None else f"reward {sample.reward:.4g}{f' ({parts})' if parts else ''}"
    text = Text.assemble((f"{title}{reward}, {sample.num_tokens} tokens, {shortened(sample.why, _PROMPT)}", "cyan"))
    row = ", ".join(f"{name}: {value}" for name, value in sample.row.items())
    for name, content, most in (
        ("system", sample.system, _PROMPT),
        ("prompt", sample.prompt, _PROMPT),
        ("row", row, _PROMPT),
        ("response", sample.response, _RESPONSE),
    ):
        if name == "response" and sample.segments:
            _add_segments(text, sample.segments)
        elif content or name in ("prompt", "response"):
            text.append(f"\n{name:9}", "dim").append(shortened(content, most))
    for judge, answer in sample.verdicts[:_MAX_VERDICTS]:
        text.append(f"\n{'verdict':9}", "dim").append(f"{shortened(judge, _PROMPT)}: {shortened(answer, _PROMPT)}")
    if len(sample.verdicts) > _MAX_VERDICTS:
        text.append(f"\n{len(sample.verdicts) - _MAX_VERDICTS} more verdicts: see rl view", "dim")
    return text


def _add_segments(text: Text, segments: Sequence[SampleSegment]) -> None:
    for segment in segments[:_MAX_SEGMENTS]:
        text.append(f"\n{segment.title}", "cyan")
        left_out = max(len(segment.messages) - _MAX_MESSAGES, 0)
        first = _MAX_MESSAGES // 2
        for index, (role, content) in enumerate(segment.messages):
            if index == first and left_out:
                text.append(f"\n{'':11}... {left_out} more messages ...", "dim")
            if not first <= index < first + left_out:
                most = _RESPONSE if role == "policy" else _PROMPT
                text.append(f"\n  {role:10}", "dim").append(shortened(content, most))
    if len(segments) > _MAX_SEGMENTS:
        text.append(f"\n{len(segments) - _MAX_SEGMENTS} more segments: see rl view, or the file of the step", "dim")


def _indented(text: Text, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def shortened(text: str, most: int) -> str:
    """Return a string on one line, its middle left out if it is long."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    head = 2 * (most - 5) // 3
    return f"{line[:head]} ... {line[-(most - 5 - head) :]}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table
