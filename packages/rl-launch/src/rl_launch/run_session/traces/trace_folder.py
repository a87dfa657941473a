"""The files of a folder `traces`: Chrome traces by range of steps, and the busy shares of ranges that are complete.

`step_<first>-<last>.json` is being written: an array without its last bracket, which Chrome's format allows. Once later
steps have been made it is closed, compressed to `step_<first>-<last>.json.gz` and summed up as a line of `busy.jsonl`.
The oldest files are removed when all together exceed `MAX_BYTES`; their lines remain.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

FOLDER = "traces"
STEPS_PER_FILE = 20
MAX_EVENTS = 500_000
"""Maximum number of events in a file; further ones are dropped and counted."""

MAX_BYTES = 256 * 2**20
"""Maximum size of all compressed files."""

BUSY = "busy.jsonl"

_NAME = re.compile(r"step_(\d+)-(\d+)\.json(\.gz)?")

Event = Mapping[str, Any]
"""An event of a Chrome trace."""


@dataclass(frozen=True)
class Piece:
    """A span or a mark of a process.

    Args:
        process: Its name, such as `policy-0`.
        track: Its row in the process.
        name: Name of the work, or of what happened.
        begin: Microseconds since 1970.
        duration: Microseconds; None for a mark.
        count: Number of overlapping pieces of work in it.
    """

    process: str
    track: str
    name: str
    begin: float
    duration: float | None
    count: int = 1


@dataclass(frozen=True)
class TraceFile:
    """A file of a folder `traces`.

    Args:
        first, last: Range of its steps.
        path: Path of the file.
    """

    first: int
    last: int
    path: Path

    @property
    def is_open(self) -> bool:
        """Return whether it may still be written."""
        return self.path.suffix == ".json"

    def events(self) -> Iterator[Event]:
        """Yield the events one by one. A line that is being written is left out."""
        with gzip.open(self.path, "rt", encoding="utf-8") if not self.is_open else self.path.open() as file:
            for line in file:
                text = line.strip().rstrip(",")
                if text not in ("", "[", "]"):
                    with suppress(ValueError):
                        yield json.loads(text)


def range_of(step: int) -> tuple[int, int]:
    """Return the first and the last step of the file that a step belongs to; events before step 1 belong to it."""
    first = (max(step, 1) - 1) // STEPS_PER_FILE * STEPS_PER_FILE + 1
    return first, first + STEPS_PER_FILE - 1


def trace_files(folder: Path) -> list[TraceFile]:
    """Return the files in the order of their steps; of a range that is being compressed, the open one."""
    found: dict[int, TraceFile] = {}
    try:
        names = sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and (int(match[1]) not in found or not match[3]):
            found[int(match[1])] = TraceFile(int(match[1]), int(match[2]), folder / name)
    return [found[first] for first in sorted(found)]


def range_shares(folder: Path) -> list[RangeShares]:
    """Return the busy shares of the ranges that are complete, each as it was last summed up, in order."""
    found: dict[int, RangeShares] = {}
    with suppress(FileNotFoundError), (folder / BUSY).open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError):
                shares = RangeShares(**json.loads(line))
                found[shares.first] = shares
    return [found[first] for first in sorted(found)]


class TraceWriter:
    """Writes events of steps, which come in about the order of their steps; used by one thread.

    Files that an earlier process left open are continued if their steps are made again, and closed otherwise.

    Args:
        folder: Made with the first event.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = 0
        self._file: IO[str] | None = None
        self._path = folder
        self._num_events = 0
        self._num_dropped = 0
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def append(self, step: int, pieces: Iterable[Piece]) -> None:
        """Write pieces of a step; pieces of a range that has been closed go to the current file."""
        first, last = range_of(step)
        if self._file is None or first > self._first:
            self._open(first, last)
        for piece in pieces:
            if self._num_events >= MAX_EVENTS:
                self._num_dropped += 1
            else:
                process, track = self._place(piece)
                event: dict[str, Any] = {"name": piece.name, "cat": piece.track, "pid": process, "tid": track}
                event["ts"] = round(piece.begin, 3)
                # A mark is an instant of its process.
                took = piece.duration
                event |= {"ph": "i", "s": "p"} if took is None else {"ph": "X", "dur": round(took, 3)}
                self._write(event if piece.count == 1 else {**event, "args": {"count": piece.count}})

    def flush(self) -> None:
        """Make what was written visible to readers."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Complete the file that is open."""
        if self._file is None:
            return
        if self._num_dropped:
            text = f"{self._num_dropped} more events were dropped"
            self._write({"name": text, "ph": "i", "s": "g", "ts": 0, "pid": 0, "tid": 0})
        self._file.close()
        self._file = None
        _complete(self._path)
        sizes = [(each, each.path.stat().st_size) for each in trace_files(self._folder) if not each.is_open]
        total = sum(size for _, size in sizes)
        for each, size in sizes[:-1]:
            if total <= MAX_BYTES:
                return
            each.path.unlink(missing_ok=True)
            total -= size

    def _open(self, first: int, last: int) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"step_{first}-{last}.json"
        for left in trace_files(self._folder):
            if left.is_open and left.path != self._path:
                _complete(left.path)
        packed = self._path.with_suffix(".json.gz")
        if packed.exists() and not self._path.exists():
            part = self._path.with_suffix(".json.part")
            with gzip.open(packed, "rb") as compressed, part.open("wb") as plain:
                shutil.copyfileobj(compressed, plain)
            part.replace(self._path)
            packed.unlink()
        self._first, self._num_events, self._num_dropped = first, 0, 0
        self._processes, self._tracks = {}, {}
        if self._path.exists():
            _cut_to_whole_events(self._path)
            found = TraceFile(first, last, self._path)
            for event in found.events():
                self._num_events += 1
                if event["name"] == "process_name":
                    self._processes[event["args"]["name"]] = event["pid"]
                elif event["name"] == "thread_name":
                    self._tracks[event["pid"], event["args"]["name"]] = event["tid"]
        self._file = self._path.open("a", encoding="utf-8")
        if not self._file.tell():
            self._file.write("[")

    def _place(self, piece: Piece) -> tuple[int, int]:
        """Return the numbers of a process and of a track, which are declared when they first occur in the file."""
        if piece.process not in self._processes:
            number = self._processes[piece.process] = len(self._processes)
            self._name("process_name", number, 0, name=piece.process)
            self._name("process_sort_index", number, 0, sort_index=number)
        process = self._processes[piece.process]
        if (process, piece.track) not in self._tracks:
            number = self._tracks[process, piece.track] = 1 + sum(each == process for each, _ in self._tracks)
            self._name("thread_name", process, number, name=piece.track)
        return process, self._tracks[process, piece.track]

    def _name(self, kind: str, process: int, track: int, **named: str | int) -> None:
        self._write({"name": kind, "ph": "M", "pid": process, "tid": track, "args": named})

    def _write(self, event: Event) -> None:
        assert self._file is not None
        text = json.dumps(event, separators=(",", ":"))
        self._file.write(f"{',' if self._num_events else ''}\n{text}")
        self._num_events += 1


def _complete(path: Path) -> None:
    """Close the array, compress the file and sum it up."""
    _cut_to_whole_events(path)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n]\n")
    match = _NAME.fullmatch(path.name)
    assert match is not None
    found = TraceFile(int(match[1]), int(match[2]), path)
    shares = shares_of(found.first, found.last, found.events())
    packed, part = path.with_suffix(".json.gz"), path.with_suffix(".json.gz.part")
    with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=5) as compressed:
        shutil.copyfileobj(plain, compressed)
    part.replace(packed)
    path.unlink()
    with (path.parent / BUSY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(shares), separators=(",", ":")) + "\n")


def _cut_to_whole_events(path: Path) -> None:
    """Remove the end of an array, or an event that a process was killed in, and the comma before it."""
    data = path.read_bytes()
    end = data.rfind(b"}") + 1
    while end and not _is_whole(data[data.rfind(b"\n", 0, end) + 1 : end]):
        end = data.rfind(b"}", 0, data.rfind(b"\n", 0, end) + 1) + 1
    with path.open("r+b") as file:
        file.truncate(end or (1 if data[:1] == b"[" else 0))


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


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
