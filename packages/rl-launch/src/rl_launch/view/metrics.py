"""Metrics of a run as columns that follow `metrics.jsonl` while it grows."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from typing import IO, Any, Literal

from rl_launch.run_session.rollouts.run_files import metrics_row
from rl_launch.show.report import MetricSummary, summaries_of

Axis = Literal["step", "time", "tokens"]
AXES: tuple[Axis, ...] = ("step", "time", "tokens")

TOKENS = ("train/num_tokens", "generation/num_tokens")
"""Metrics that count the tokens of a step, the first that a run has."""


class FollowedMetrics:
    """The metrics of a run in memory, eight bytes per number. Only what was added to the file is read again. Any thread
    may call it.

    Args:
        path: Path of `metrics.jsonl`, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read, self._inode = 0, -1
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}

    def update(self) -> None:
        """Read the added lines. A file that was replaced, as a resumed run does, is read from its beginning."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._take(file)
            except FileNotFoundError:
                self._clear()

    def _take(self, file: IO[bytes]) -> None:
        facts = os.fstat(file.fileno())
        if facts.st_ino != self._inode or facts.st_size < self._read:
            self._clear()
            self._inode = facts.st_ino
        file.seek(self._read)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._read += len(line)
            row = metrics_row(line.decode(errors="replace"))
            if row is None or not isinstance(row["step"], int):
                continue
            count = len(self.steps)
            self.steps.append(row["step"])
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    column = self.columns.setdefault(name, array("d"))
                    column.extend([nan] * (count - len(column)))
                    column.append(value)

    def _clear(self) -> None:
        self._read, self._inode = 0, -1
        self.steps, self.columns = array("q"), {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each step, as `RunFolder.metrics` returns them, without values that are not finite."""
        columns = list(self.columns.items())
        for at, step in enumerate(self.steps):
            values = {name: column[at] for name, column in columns if at < len(column) and isfinite(column[at])}
            yield {"step": step, **values}

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and finite values of a metric."""
        column = self.columns.get(name, ())
        return [(step, value) for step, value in zip(self.steps, column, strict=False) if isfinite(value)]

    def summaries(self) -> list[MetricSummary]:
        """Return summaries of all metrics that have a value, times included."""
        return summaries_of({name: self.series(name) for name in self.columns})

    def axis(self, by: Axis) -> Sequence[float]:
        """Return the place of each step on an axis: its number, or the seconds or tokens of all steps until its end.
        Steps that did not record it add nothing."""
        if by == "step":
            return self.steps
        names = ("time/step",) if by == "time" else TOKENS
        column = next((self.columns[name] for name in names if name in self.columns), array("d"))
        total, found = 0.0, array("d")
        for position in range(len(self.steps)):
            value = column[position] if position < len(column) else nan
            total += 0.0 if isnan(value) else value
            found.append(total)
        return found

    def points(self, name: str, by: Axis, low: float, high: float, most: int) -> tuple[list[float], list[float]]:
        """Return points of a metric for a plot, thinned so that every peak remains.

        Args:
            name: Name of the metric.
            by: The horizontal axis.
            low: Smallest place on the axis.
            high: Largest place on the axis.
            most: Maximum number of points, about.

        Returns:
            Places on the axis and values, of equal length.
        """
        column = self.columns.get(name, ())
        points = zip(self.axis(by), column, strict=False)
        kept = thinned([each for each in points if low <= each[0] <= high and isfinite(each[1])], most)
        return [place for place, _ in kept], [value for _, value in kept]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return the first, last, lowest and highest point of equal parts of a series, in order.

    Args:
        points: Places and values.
        most: Number of points beyond which it is thinned, at least 4.
    """
    if len(points) <= most:
        return list(points)
    parts = max(1, most // 4)
    found: list[tuple[float, float]] = []
    for part in range(parts):
        low, high = part * len(points) // parts, (part + 1) * len(points) // parts
        span = range(low, high)
        chosen = {low, high - 1, min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])}
        found.extend(points[position] for position in sorted(chosen))
    return found
