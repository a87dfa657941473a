"""Spans of work of this process, kept in a small ring until the run collects them.

Recording costs about a microsecond and never blocks. A process that nobody collects from keeps its newest spans only.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_SPANS = 8192
"""Maximum number of spans that a process keeps; older ones are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work.

    Args:
        track: Row of the process that it belongs to; spans of one track do not overlap, except for nested ones.
        name: Name of the work.
        begin, end: Nanoseconds of the clock of its machine (`time.monotonic_ns`); equal for a mark.
        count: Number of overlapping pieces that were joined into it.
    """

    track: str
    name: str
    begin: int
    end: int
    count: int = 1


@dataclass(frozen=True)
class SpanReport:
    """The spans of a process since it was last asked.

    Args:
        pid: Its process id.
        host: Its machine.
        clock: Identifies the clock of its spans: processes with the same `clock` share it.
        now: Time of the report on that clock, in nanoseconds.
        spans: The spans, in order of their ends.
        num_dropped: Number of spans that were dropped because nobody asked for them.
    """

    pid: int
    host: str
    clock: str
    now: int
    spans: tuple[Span, ...]
    num_dropped: int = 0


class SpanRing:
    """The spans of a process. Any thread may record.

    Args:
        most: Maximum number of spans to keep.
    """

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=most)
        self._num_dropped = 0
        self._overlapping: set[Overlapping] = set()

    def record(self, track: str, name: str, begin: int, end: int, count: int = 1) -> None:
        """Record a span that has ended."""
        with self._lock:
            self._append(Span(track, name, begin, end, count))

    def mark(self, track: str, name: str) -> None:
        """Record that something happened."""
        now = time.monotonic_ns()
        self.record(track, name, now, now)

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Record the block, also if it raises."""
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(track, name, begin, time.monotonic_ns())

    def overlapping(self, track: str, name: str) -> Overlapping:
        """Return a context for work in several concurrent pieces: the time while at least one is in progress is one
        span. Call it once for each track, and enter it for each piece."""
        made = Overlapping(self, track, name)
        with self._lock:
            self._overlapping.add(made)
        return made

    def take(self) -> SpanReport:
        """Return the spans since the last call. Overlapping work in progress is cut here, and continues as the next
        span."""
        with self._lock:
            now = time.monotonic_ns()
            for each in self._overlapping:
                each._cut(now)
            spans, num_dropped = tuple(self._spans), self._num_dropped
            self._spans.clear()
            self._num_dropped = 0
        return SpanReport(os.getpid(), socket.gethostname(), machine_clock(), now, spans, num_dropped)

    def _append(self, span: Span) -> None:
        self._num_dropped += len(self._spans) == self._most
        self._spans.append(span)


class Overlapping:
    """Context of one track of overlapping work; see `SpanRing.overlapping`."""

    def __init__(self, ring: SpanRing, track: str, name: str) -> None:
        self._ring = ring
        self._track = track
        self._name = name
        self._begin = 0
        self._num_open = 0
        self._count = 0

    def __enter__(self) -> None:
        with self._ring._lock:
            if not self._num_open:
                self._begin, self._count = time.monotonic_ns(), 0
            self._num_open += 1
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._ring._lock:
            self._num_open -= 1
            if not self._num_open:
                self._ring._append(Span(self._track, self._name, self._begin, time.monotonic_ns(), self._count))

    def _cut(self, now: int) -> None:
        if self._num_open:
            self._ring._append(Span(self._track, self._name, self._begin, now, self._count))
            self._begin, self._count = now, self._num_open


def machine_clock() -> str:
    """Return an identifier of the clock `time.monotonic_ns`, which starts with the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


RING = SpanRing()
"""The spans of this process."""

record, mark, span, overlapping, take = RING.record, RING.mark, RING.span, RING.overlapping, RING.take
