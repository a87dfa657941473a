"""Messages between the sender and one receiver, each in bounded time: headers and digests, never tensors."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rl_core.errors import WeightSyncError
from rl_core.weights import Transport

_LENGTH = struct.Struct("!I")

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


@contextmanager
def asking(reason: Callable[[], str]) -> Iterator[None]:
    """Make the waits of this thread inside the context fail once `reason` returns one; it is called only by waits that
    last longer than `SLICE_S`."""
    before = getattr(_transfer, "reason", str)
    _transfer.reason = reason
    try:
        yield
    finally:
        _transfer.reason = before


class Deadline:
    """The point in time when a phase must be over.

    Args:
        seconds: Seconds from now.
        phase: The work and who does it, for the error.
    """

    def __init__(self, seconds: float, phase: str) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._address: str | None = getattr(_transfer, "address", None)
        self.phase = phase

    def remaining(self) -> float:
        """Return the seconds left; raises `WeightSyncError` if there are none, or the transfer was interrupted."""
        if self._address is not None and self._address in _interruptions:
            raise WeightSyncError(f"interrupted during {self.phase}: {_interruptions[self._address]}")
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.expired()
        return left

    def slice(self) -> float:
        """Return the seconds to wait before asking again; raises as `remaining`."""
        return min(self.remaining(), SLICE_S)

    def ask(self) -> None:
        """Raise `WeightSyncError` if there is a reason, as `asking` has it, to wait no longer."""
        if reason := getattr(_transfer, "reason", str)():
            raise WeightSyncError(f"interrupted during {self.phase}: {reason}")

    def expired(self) -> WeightSyncError:
        """Return the error that shows what took too long."""
        return WeightSyncError(f"weight transfer timed out after {self._seconds:g} s: {self.phase}")


class Channel:
    """A connected socket that carries JSON messages, each in bounded time.

    Args:
        peer: Who is at the other end, as errors name it.
        timeout_s: Bound of one send or receive.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        if connection.family != socket.AF_UNIX:
            # otherwise a message waits up to 40 ms for the peer's kernel to acknowledge the one before
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self.close = connection.close
        self.fileno = connection.fileno()
        self.peer = peer
        self.timeout_s = timeout_s

    def send(self, message: dict[str, Any], phase: str) -> None:
        """Send a message; raises `WeightSyncError` if the peer is gone or does not read."""
        body = json.dumps(message).encode()
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError:
            raise self._deadline(phase).expired() from None
        except OSError:
            raise self._last_words(phase) from None

    def receive(self, phase: str, deadline: Deadline | None = None) -> dict[str, Any]:
        """Return the next message; raises `WeightSyncError` if none comes in time, the peer is gone or gave up."""
        deadline = deadline or self._deadline(phase)
        length = _LENGTH.unpack(self._read(_LENGTH.size, phase, deadline))[0]
        message: dict[str, Any] = json.loads(self._read(length, phase, deadline))
        if "abort" in message:
            raise WeightSyncError(f"{self.peer} gave up during {phase}: {message['abort']}")
        return message

    def check(self, phase: str) -> None:
        """Raise `WeightSyncError` if the peer is gone or gave up; messages yet unread stay unread."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(0):
            return
        try:
            head = self._socket.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            head = b""
        if not head or b'{"abort"' in head:
            raise self._last_words(phase)

    def send_files(self, files: Sequence[int]) -> None:
        """Hand open files over to the peer, on the same machine."""
        socket.send_fds(self._socket, [b"f"], files)

    def receive_files(self, count: int, phase: str) -> list[int]:
        """Return the files handed over by the peer; the caller closes them."""
        deadline = self._deadline(phase)
        self._socket.settimeout(deadline.remaining())
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 1, count)
        except TimeoutError:
            raise deadline.expired() from None
        if not data or len(files) != count:
            raise self._lost(phase)
        return files

    def abort(self, reason: str) -> None:
        """Tell the peer why nothing more will come, if it still listens."""
        body = json.dumps({"abort": reason}).encode()
        try:
            self._socket.settimeout(1.0)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError:
            return

    def await_close(self, timeout_s: float) -> None:
        """Wait until the peer has closed its end, for at most this time; further messages are dropped."""
        end = time.monotonic() + timeout_s
        with suppress(OSError):
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 16):
                    return

    @property
    def local_host(self) -> str:
        """Address of this end, as the peer can reach it."""
        return str(self._socket.getsockname()[0])

    def _read(self, count: int, phase: str, deadline: Deadline) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(deadline.slice())
            try:
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                deadline.ask()
                continue
            except OSError:
                raise self._lost(phase) from None
            if not part:
                raise self._lost(phase)
            data += part
        return bytes(data)

    def _last_words(self, phase: str) -> WeightSyncError:
        """Return the reason why the peer left, if it managed to say so."""
        deadline = Deadline(1.0, phase)
        try:
            while True:
                self.receive(phase, deadline)
        except WeightSyncError as error:
            return error

    def _deadline(self, phase: str) -> Deadline:
        return Deadline(self.timeout_s, f"{phase}, waiting for {self.peer}")

    def _lost(self, phase: str) -> WeightSyncError:
        return WeightSyncError(f"lost {self.peer} during {phase}")


class Receivers(dict[int, Channel]):
    """Connections to receivers by their ranks."""

    def send(self, message: dict[str, Any], phase: str) -> None:
        """Send a message to every receiver."""
        for channel in self.values():
            channel.send(message, phase)

    def gather(self, phase: str) -> dict[int, dict[str, Any]]:
        """Return the next message of every receiver, in whatever order they come; raises `WeightSyncError` as soon as
        one of them is gone or gives up.
        """
        messages: dict[int, dict[str, Any]] = {}
        waiting = select.poll()
        ranks = {channel.fileno: rank for rank, channel in self.items()}
        for descriptor in ranks:
            waiting.register(descriptor, select.POLLIN)
        deadline = Deadline(min((each.timeout_s for each in self.values()), default=0.0), phase)
        while missing := [channel.peer for rank, channel in self.items() if rank not in messages]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            deadline.phase = f"{phase}, waiting for {missing[0]}{more}"
            for descriptor, _ in waiting.poll(1000 * deadline.slice()):
                # A receiver that has answered sends nothing before it is answered, unless it gives up.
                messages[ranks[descriptor]] = self[ranks[descriptor]].receive(phase)
        return dict(sorted(messages.items()))

    def check(self, phase: str) -> None:
        """Raise `WeightSyncError` if a receiver is gone or gave up."""
        for channel in self.values():
            channel.check(phase)

    def abort(self, reason: str) -> None:
        """Tell every receiver why nothing more will come."""
        for channel in self.values():
            channel.abort(reason)

    def close(self) -> None:
        """Close every connection."""
        for channel in self.values():
            channel.close()
