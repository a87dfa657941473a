"""Line charts in the dots of braille characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# the bit of each dot of a braille character, by row and column
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_LABEL = 8

Points = Sequence[tuple[float, float]]
"""Steps in ascending order, each with a finite value."""


def chart(title: str, points: Points, *, width: int, height: int = 7) -> list[str]:
    """Values over steps, with the range of both on the axes.

    Args:
        title: the first line.
        points: at least one.
        width: characters of a line.
        height: lines of the plot itself.

    Returns:
        `height + 2` lines of `width` characters.
    """
    columns = width - _LABEL - 1
    low, high = min(value for _, value in points), max(value for _, value in points)
    rows = _canvas(_dots(points, 2 * columns, 4 * height, low, high), columns, height)
    labels = [_label(high), *[""] * (height - 2), _label(low)]
    lines = [f"{label:>{_LABEL}} {row}" for label, row in zip(labels, rows, strict=True)]
    first, last = f"{points[0][0]:g}", f"step {points[-1][0]:g}"
    axis = f"{'':{_LABEL}} {first}{last:>{columns - len(first)}}"
    return [f"{'':{_LABEL}} {title}"[:width].ljust(width), *lines, axis]


def _label(value: float) -> str:
    return next(text for digits in (4, 2, 1) if len(text := f"{value:.{digits}g}") <= _LABEL)


def beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Two charts of one height side by side."""
    return [f"{one}  {other}" for one, other in zip(left, right, strict=True)]


def _dots(points: Points, width: int, height: int, low: float, high: float) -> list[tuple[int, int]]:
    """Columns and rows, from the top left, of a line through the points."""
    first, last = points[0][0], points[-1][0]
    across = (width - 1) / (last - first) if last > first else 0.0
    # the mean of what falls into one column; a flat line lies in the middle
    columns: dict[int, list[float]] = {}
    for step, value in points:
        columns.setdefault(round((step - first) * across), []).append(value)
    scale = (height - 1) / (high - low) if high > low else 0.0
    offset = 0 if high > low else height // 2
    knots = [(x, height - 1 - offset - round((sum(each) / len(each) - low) * scale)) for x, each in columns.items()]
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
