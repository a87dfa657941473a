"""Time that a replica spends without rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable


class IdleTime:
    """Seconds without work since the first work, measured from one look to the next.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at: float | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def begin(self) -> None:
        """There is work."""
        now = self._clock()
        if self._looked_at is None:
            self._looked_at = now
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def end(self) -> None:
        """All work is done."""
        self._idle_since = self._clock()

    def take(self) -> tuple[float, float]:
        """Seconds without work since the last look, or the first work, and all seconds since then."""
        if self._looked_at is None:
            return 0.0, 0.0
        now = self._clock()
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        found = self._idle_s, now - self._looked_at
        self._idle_s, self._looked_at = 0.0, now
        return found
