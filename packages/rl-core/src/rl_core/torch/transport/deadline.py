"""The time a phase of a transfer may take."""

from __future__ import annotations

import time

from rl_core.errors import WeightSyncError


class Deadline:
    """A point in time by which a phase must be over.

    Args:
        seconds: from now.
        phase: what is being done and for whom, as the error says it.
    """

    def __init__(self, seconds: float, phase: str) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.phase = phase

    def remaining(self) -> float:
        """Seconds left; raises `WeightSyncError` where there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.expired()
        return left

    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self._end <= time.monotonic()

    def expired(self) -> WeightSyncError:
        """The error that says what took too long."""
        return WeightSyncError(f"weight transfer timed out after {self._seconds:g} s: {self.phase}")
