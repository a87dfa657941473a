"""Traces of a run while it makes steps: spans are collected and written in the background."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.tracing import spans
from rl_core.tracing.spans import SpanReport
from rl_launch.run_session.observer import RunObserver
from rl_launch.run_session.traces.trace_folder import STEPS, Piece, TraceWriter

_log = logging.getLogger(__name__)

DRIVER = "driver"

RESTARTS = "restarts"
"""Track of the driver with a mark for each process that was lost or replaced."""

PERIOD_S = 10.0
"""Minimum time in seconds between two collections; spans of shorter steps are collected together."""

MAX_SHARE = 0.0025
"""Maximum share of time that the thread computes: the more workers a run has, the less often they are asked. Ray's
threads take about as much again."""

CLOSE_TIMEOUT_S = 30.0

_KEPT_STEPS = 1000


@dataclass(frozen=True)
class Collected:
    """Spans of one process.

    Args:
        process: Its name, such as `policy-0`.
        report: Its report.
        offset: Nanoseconds to add to its times for times of the driver's clock.
    """

    process: str
    report: SpanReport
    offset: int = 0


class StepTrace(RunObserver):
    """Writes the spans of all processes to the folder `traces` of a run.

    A thread collects and writes; the run waits for it only when it ends. A failure turns the trace off, with a warning.

    Args:
        folder: The folder of the files.
        collect: Asks the other processes for their spans, and waits for the answers.
        period_s: See `PERIOD_S`; 0 to collect after every step.
    """

    def __init__(self, folder: Path, collect: Callable[[], Sequence[Collected]], *, period_s: float = PERIOD_S) -> None:
        self._collect = collect
        self._period_s = period_s
        self._writer = TraceWriter(folder)
        # fixed, so that spans do not move against one another when the time of day is set
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._pause_ns = period_s * 1e9
        self.thread_s = 0.0
        """CPU seconds of the thread in the last collection."""
        self._since = self._begun_at = self._collected_at = time.monotonic_ns()
        self._begun: list[tuple[int, int]] = []
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="step-trace", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        self._begun_at = time.monotonic_ns()
        # replaced, not changed: the thread reads it
        self._begun = [*self._begun[1 - _KEPT_STEPS :], (self._begun_at, step)]

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that a step has ended, and have its spans collected."""
        now = time.monotonic_ns()
        spans.record(STEPS, f"step {step}", self._begun_at, now)
        if now - self._collected_at >= self._pause_ns:
            self._collected_at = now
            self._wake.set()

    def close(self) -> None:
        """Write the rest, and complete the file."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("the trace of the last steps was not written within %g s", CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                is_last, began = self._is_closed, time.thread_time_ns()
                own = Collected(DRIVER, spans.take())
                self._write([own, *self._collect()])
                if is_last:
                    self._writer.close()
                    return
                self._writer.flush()
                self.thread_s = (time.thread_time_ns() - began) / 1e9
                self._pause_ns = 1e9 * max(self._period_s, self.thread_s / MAX_SHARE if self._period_s else 0.0)
        except Exception as error:  # noqa: BLE001 - a trace is not worth a run
            _log.warning("no traces from here: %s: %s", type(error).__name__, error)

    def _write(self, collected: Sequence[Collected]) -> None:
        begun = self._begun
        by_step: dict[int, list[Piece]] = {}
        for each in collected:
            for span in each.report.spans:
                begin = span.begin + each.offset
                # earlier ones are of a run before; a restart belongs to the run that follows it
                if begin >= self._since or span.track == RESTARTS:
                    # A time before the first step belongs to it.
                    place = max(0, bisect_right(begun, begin, key=lambda step: step[0]) - 1)
                    duration = None if span.begin == span.end else (span.end - span.begin) / 1000
                    at = (begin + self._epoch) / 1000
                    piece = Piece(each.process, span.track, span.name, at, duration, span.count)
                    by_step.setdefault(begun[place][1] if begun else 1, []).append(piece)
        for step in sorted(by_step):
            self._writer.append(step, by_step[step])
