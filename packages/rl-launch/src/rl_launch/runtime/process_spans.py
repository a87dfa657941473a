"""Spans of the processes of a run, asked for through Ray and moved to the driver's clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle

from rl_core.errors import Origin, RLError
from rl_core.ray.calls import fetch, wait
from rl_core.tracing.spans import SpanReport, machine_clock
from rl_launch.session.traces.step_trace import Collected

_log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Maximum wait in seconds for all answers; a process that answers later keeps its spans until it is asked again."""

_STALE_S = 600.0
"""Age in seconds of an estimate of a clock that a worse one replaces, because clocks drift."""


@dataclass(frozen=True)
class NamedActor:
    """A process of the run.

    Args:
        name: Its name, the same as of its log: `policy-0`, `rollout-worker-1`, `environment-math`.
        actor: Its host.
    """

    name: str
    actor: ActorHandle


class ProcessSpans:
    """Collects the spans of all processes of a run; used by one thread.

    The offset of another machine's clock is half of the time between question and answer at most, so the quickest
    answer of a machine gives the estimate. Processes of this machine share the driver's clock.

    Args:
        actors: Returns the processes as they are now.
        timeout_s: See `TIMEOUT_S`.
    """

    def __init__(self, actors: Callable[[], Sequence[NamedActor]], *, timeout_s: float = TIMEOUT_S) -> None:
        self._actors = actors
        self._timeout_s = timeout_s
        self._clocks = Clocks(machine_clock())

    def collect(self) -> list[Collected]:
        """Ask all processes, and return the answers that come in time."""
        asked: dict[Any, tuple[str, int]] = {}
        for each in self._actors():
            asked[each.actor.take_spans.remote()] = (each.name, time.monotonic_ns())
        end = time.monotonic() + self._timeout_s
        found: list[Collected] = []
        while asked and (left := end - time.monotonic()) > 0:
            for ref in wait(list(asked), left):
                name, sent = asked.pop(ref)
                try:
                    report: SpanReport = fetch(ref, Origin(name, 0, "its node", "spans"), 0)
                except RLError as error:
                    # whoever needs the process says that it is gone
                    _log.debug("no spans of %s: %s", name, error)
                    continue
                self._clocks.note(report.clock, report.now, sent, time.monotonic_ns())
                found.append(Collected(name, report))
        return [Collected(each.process, each.report, self._clocks.offset(each.report.clock)) for each in found]


class Clocks:
    """Offsets between the clocks of machines and the driver's.

    Args:
        own: Identifier of the driver's clock.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._estimates: dict[str, tuple[int, int, int]] = {}

    def note(self, clock: str, now: int, sent: int, received: int) -> None:
        """Take an answer into account.

        Args:
            clock: Clock of the process that answered.
            now: Its time when it answered, in nanoseconds.
            sent: Driver's time of the question.
            received: Driver's time of the answer.
        """
        error, offset = received - sent, (sent + received) // 2 - now
        known = self._estimates.get(clock)
        if known is None or error <= known[0] or received - known[2] > _STALE_S * 1e9:
            self._estimates[clock] = error, offset, received

    def offset(self, clock: str) -> int:
        """Return the nanoseconds to add to a time of a clock for the driver's; 0 for its own clock."""
        return 0 if clock == self._own else self._estimates[clock][1]
