"""The end of a program before its time, from another thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cancellation:
    """Ends the programs that run under it, and those that would be started later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self._is_cancelled

    def cancel(self) -> None:
        """End the program that runs; the thread that waits for it gets a `SandboxFailed`."""
        with self._lock:
            self._is_cancelled = True
            self._shut()

    @contextlib.contextmanager
    def ending(self, connection: socket.socket) -> Iterator[None]:
        """Shut a connection down if this is cancelled while the context lasts."""
        with self._lock:
            self._connection = connection
            if self._is_cancelled:
                self._shut()
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
