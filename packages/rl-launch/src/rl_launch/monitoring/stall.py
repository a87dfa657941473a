"""Whether a run takes unusually long for a step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

USUAL_OF = 16
"""Last steps whose time is usual."""

LEAST_S = 60.0
"""Time without a step below which no run is stalled."""


class StallWatch:
    """Compares the time since the last step with the usual time between steps, evaluations and saves included. One
    thread notes steps, and another one checks.

    Args:
        multiple: Of the usual time, after which the run is stalled.
        clock: Seconds.
    """

    def __init__(self, multiple: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._multiple = multiple
        self._clock = clock
        self._lock = threading.Lock()
        self._gaps_s: deque[float] = deque(maxlen=USUAL_OF)
        self._last: float | None = None
        self._is_noted = False

    def start(self) -> None:
        """The first step begins; how long it may take is not known."""
        with self._lock:
            self._last = self._clock()
            self._gaps_s.clear()
            self._is_noted = False

    def note_step(self) -> None:
        """A step is complete."""
        with self._lock:
            now = self._clock()
            if self._last is not None:
                self._gaps_s.append(now - self._last)
            self._last = now
            self._is_noted = False

    def stop(self) -> None:
        """The run makes no further steps."""
        with self._lock:
            self._last = None

    def check(self) -> tuple[float, float] | None:
        """Return the seconds since the last step and the usual ones if the run is stalled and that was not returned
        since its last step.
        """
        with self._lock:
            if self._last is None or not self._gaps_s or self._is_noted:
                return None
            usual_s, passed_s = median(self._gaps_s), self._clock() - self._last
            self._is_noted = passed_s > max(LEAST_S, self._multiple * usual_s)
            return (passed_s, usual_s) if self._is_noted else None
