"""The shares of time that the rows of a trace are busy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

STEPS = "steps"
"""Track of the driver with one span for each step."""

Row = tuple[str, str]
"""A process, and one of its tracks."""


@dataclass(frozen=True)
class RangeShares:
    """Busy shares of the rows of a range of steps.

    Args:
        first, last: The range.
        seconds: Duration of its steps.
        shares: Share of that time that each row is busy, by `PROCESS/TRACK`.
    """

    first: int
    last: int
    seconds: float
    shares: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the line of `busy.jsonl`."""
        return {"first": self.first, "last": self.last, "seconds": self.seconds, "shares": dict(self.shares)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Return what `as_json` wrote."""
        shares = {str(row): float(share) for row, share in line["shares"].items()}
        return cls(int(line["first"]), int(line["last"]), float(line["seconds"]), shares)


def shares_of(first: int, last: int, events: Iterable[Mapping[str, Any]]) -> RangeShares:
    """Sum up the events of a file: time counts while a step is being made."""
    names: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        place = (event["pid"], event["tid"])
        if event["ph"] == "X":
            spans.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            tracks[place] = event["args"]["name"]
    rows = {(names.get(pid, ""), tracks.get((pid, tid), "")): found for (pid, tid), found in spans.items()}
    steps = union([span for (_, track), found in rows.items() if track == STEPS for span in found])
    whole = length(steps)
    shares = {
        f"{process}/{track}": round(overlap(union(found), steps) / whole, 4)
        for (process, track), found in rows.items()
        if whole and track != STEPS
    }
    return RangeShares(first, last, round(whole / 1e6, 3), shares)


def union(spans: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the union of intervals as disjoint ones in order, float64 `[intervals, 2]`."""
    if not spans:
        return np.zeros((0, 2))
    ordered = np.array(sorted(spans), dtype=np.float64)
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:, 0] > reached[:-1]]))
    ends = np.concatenate([begins[1:] - 1, [len(ordered) - 1]])
    return np.stack([ordered[begins, 0], reached[ends]], axis=1)


def length(intervals: np.ndarray) -> float:
    """Return the length of disjoint intervals `[intervals, 2]`."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return the length of the intersection of two unions, each `[intervals, 2]`."""
    if not len(first) or not len(second):
        return 0.0
    return _before(first, second[:, 1]) - _before(first, second[:, 0])


def _before(intervals: np.ndarray, times: np.ndarray) -> float:
    """Sum over times of the length of the intervals before each."""
    sums = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    index = np.searchsorted(intervals[:, 0], times, side="right")
    inside = np.where(index > 0, np.minimum(times, intervals[index - 1, 1]) - intervals[index - 1, 0], 0.0)
    return float((sums[np.maximum(index - 1, 0)] + inside).sum())
