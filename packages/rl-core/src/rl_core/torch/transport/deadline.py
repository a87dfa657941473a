"""The time a phase of a transfer may take, and the end that another thread can put to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_core.errors import WeightSyncError
from rl_core.weights import Transport

SLICE_S = 0.2
"""A wait looks up this often, to see whether the transfer has been interrupted."""

_interruptions: dict[str, str] = {}
_transfer = threading.local()


def interrupt(transport: Transport, reason: str) -> None:
    """End this process's part in a transfer: its waits fail with the reason, also those that have not begun."""
    _interruptions[transport.address] = reason


@contextmanager
def interruptible(transport: Transport) -> Iterator[None]:
    """Make the deadlines that this thread creates inside the context react to `interrupt` of this transfer."""
    before = getattr(_transfer, "address", None)
    _transfer.address = transport.address
    try:
        yield
    finally:
        _transfer.address = before
        _interruptions.pop(transport.address, None)


class Deadline:
    """A point in time by which a phase must be over.

    Args:
        seconds: Seconds from now.
        phase: The work and who does it, as the error says it.
    """

    def __init__(self, seconds: float, phase: str) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._address: str | None = getattr(_transfer, "address", None)
        self.phase = phase

    def remaining(self) -> float:
        """Return seconds left; raises `WeightSyncError` if there are none, or the transfer was interrupted."""
        if self._address is not None and self._address in _interruptions:
            raise WeightSyncError(f"interrupted during {self.phase}: {_interruptions[self._address]}")
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.expired()
        return left

    def slice(self) -> float:
        """Return seconds to wait before asking again; raises as `remaining`."""
        return min(self.remaining(), SLICE_S)

    def is_over(self) -> bool:
        """Return whether there is no time left."""
        return self._end <= time.monotonic()

    def expired(self) -> WeightSyncError:
        """Return the error that shows what took too long."""
        return WeightSyncError(f"weight transfer timed out after {self._seconds:g} s: {self.phase}")
