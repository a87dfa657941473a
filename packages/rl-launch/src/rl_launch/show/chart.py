"""Line charts in the dots of braille characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

# the bit of each dot of a braille character, by row and column
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_LABEL = 8

Points = Sequence[tuple[float, float]]
"""Steps in ascending order, each with a finite value."""


def chart(title: str, points: Points, *, width: int, height: int = 7) -> list[str]:
    """Values over steps, with the range of both on the axes.

    Args:
        title: The first line.
        points: Points of the curve; at least one.
        width: Characters of a line.
        height: Lines of the plot itself.

    Returns:
        `height + 2` lines of `width` characters.
    """
    return [line.plain for line in overlay(title, [Curve(points)], width=width, height=height)]


@dataclass(frozen=True)
class Curve:
    """One of several curves in a chart.

    Args:
        points: At least one.
        mark: Character at its last point; empty for none.
        style: Of its dots, as `rich` names styles.
    """

    points: Points
    mark: str = ""
    style: str = ""


def overlay(title: str, curves: Sequence[Curve], *, width: int, height: int = 7) -> list[Text]:
    """Curves over steps in one chart, with the range of all on the axes; where curves cross, the last one is seen.

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
    frame = _Frame(min(steps), max(steps), min(values), max(values), 2 * columns, 4 * height)
    dots = [_dots(curve.points, frame) for curve in curves]
    rows = [Text(row) for row in _canvas([dot for each in dots for dot in each], columns, height)]
    for curve, found in zip(curves, dots, strict=True):
        for x, y in found:
            rows[y // 4].stylize(curve.style, x // 2, x // 2 + 1)
    for curve, found in zip(curves, dots, strict=True):
        if curve.mark:
            x, y = found[-1]
            row, at = rows[y // 4], x // 2
            rows[y // 4] = Text.assemble(row[:at], (curve.mark, f"bold {curve.style}"), row[at + 1 :])
    labels = [_label(frame.high), *[""] * (height - 2), _label(frame.low)]
    lines = [Text.assemble(f"{label:>{_LABEL}} ", row) for label, row in zip(labels, rows, strict=True)]
    first, last = f"{frame.first:g}", f"step {frame.last:g}"
    axis = f"{'':{_LABEL}} {first}{last:>{columns - len(first)}}"
    return [Text(f"{'':{_LABEL}} {title}"[:width].ljust(width)), *lines, Text(axis)]


def _label(value: float) -> str:
    return next(text for digits in (4, 2, 1) if len(text := f"{value:.{digits}g}") <= _LABEL)


def beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Two charts of one height side by side."""
    return [f"{one}  {other}" for one, other in zip(left, right, strict=True)]


@dataclass(frozen=True)
class _Frame:
    """The range of a chart, and its size in dots."""

    first: float
    last: float
    low: float
    high: float
    width: int
    height: int


def _dots(points: Points, frame: _Frame) -> list[tuple[int, int]]:
    """Columns and rows, from the top left, of a line through the points."""
    across = (frame.width - 1) / (frame.last - frame.first) if frame.last > frame.first else 0.0
    # the mean of what falls into one column; a flat line lies in the middle
    columns: dict[int, list[float]] = {}
    for step, value in points:
        columns.setdefault(round((step - frame.first) * across), []).append(value)
    scale = (frame.height - 1) / (frame.high - frame.low) if frame.high > frame.low else 0.0
    offset = 0 if frame.high > frame.low else frame.height // 2
    bottom = frame.height - 1 - offset
    knots = [(x, bottom - round((sum(each) / len(each) - frame.low) * scale)) for x, each in columns.items()]
    dots = knots[:1]
    for (x0, y0), (x1, y1) in pairwise(knots):
        length = max(x1 - x0, abs(y1 - y0))
        dots.extend(
            (round(x0 + (x1 - x0) * k / length), round(y0 + (y1 - y0) * k / length)) for k in range(1, length + 1)
        )
    return dots


def _canvas(dots: Sequence[tuple[int, int]], columns: int, rows: int) -> list[str]:
    cells = [[_BLANK] * columns for _ in range(rows)]
    for x, y in dots:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(map(chr, row)) for row in cells]
