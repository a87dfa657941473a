"""The server: imports modules once and forks a process for every request."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl_core.fork_server.address import connected
from rl_core.fork_server.loaded import Imported
from rl_core.fork_server.process import become
from rl_core.fork_server.request import Request, receive_request, send_answer

_CHECK_PERIOD_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
MAX_SERVERS = 6
"""Maximum number of servers of one user on one machine. Each takes up to a gigabyte."""

_MIN_MEMORY = 0.1
"""Share of the machine's memory below which an idle server ends at once."""


def main(address: str, modules: Sequence[str], idle_s: float) -> None:
    """Listen at an address, unless another server does, and serve there in a process that belongs to nobody.

    Returns in the first process at once, in the server when it is idle, and in its forks after their work.
    """
    listener = listen(Path(address))
    if listener is None or os.fork():
        return
    asked = Server(listener, Path(address), modules, idle_s).serve()
    if asked is not None:
        become(*asked)


def listen(address: Path) -> socket.socket | None:
    """Listen at an address, unless another server does."""
    with open(address.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [path for path in address.parent.iterdir() if path.is_socket()]
        for path in others:
            if (answering := connected(path)) is not None:
                answering.close()
            else:
                # of a server that was killed
                path.unlink()
        if address.exists():
            return None
        # a server whose socket is gone takes no requests, and ends when its processes have
        for path in sorted(filter(Path.exists, others), key=_last_request)[: 1 - MAX_SERVERS]:
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(1024)
        return listener


def _last_request(address: Path) -> float:
    return address.stat().st_mtime


class Server:
    """Forks this process for those who connect.

    Args:
        listener: At the address.
        address: Path of the socket.
        modules: To import first.
        idle_s: Ends the server when it has had no process for so long.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: Path,
        modules: Sequence[str],
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener: socket.socket | None = listener
        self._address = address
        self._socket = address.stat().st_ino
        self._idle_s = idle_s
        self._clock = clock
        self._imported = Imported(modules)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._processes: dict[int, tuple[int, socket.socket]] = {}
        self._last_process = clock()

    def serve(self) -> tuple[Request, list[int]] | None:
        """Serve until idle or out of date; returns twice in a fork, there with the request and its streams."""
        while self._listener is not None or self._processes:
            asked = self.handle(_CHECK_PERIOD_S)
            if asked is not None:
                return asked
        return None

    def handle(self, timeout_s: float) -> tuple[Request, list[int]] | None:
        """Handle the next events, and stop listening if idle; returns twice if a process is forked, as `serve` does.

        Only processes of this server count as work: every server that starts connects to all others.
        """
        for key, _ in self._selector.select(timeout_s):
            asked = key.data(key.fileobj)
            if asked is not None:
                return asked
        is_idle = not self._processes and (self._clock() - self._last_process >= self._idle_s or _memory_is_short())
        if is_idle or not self._is_reachable():
            self._stop_listening()
        return None

    def _accept(self, listener: socket.socket) -> tuple[Request, list[int]] | None:
        if listener.fileno() < 0:
            return None  # closed by the event before
        connection, _ = listener.accept()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        try:
            credentials = struct.Struct("3i")
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
            if int(credentials.unpack(found)[1]) != os.geteuid():
                raise PermissionError("the request of another user")
            request, streams = receive_request(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        refusal = self._imported.refusal
        if refusal or self._imported.differs(request.variables):
            if not refusal:
                # the next request starts a server with the files and variables of now
                self._stop_listening()
            send_answer(connection, refusal=refusal)
            connection.close()
            for each in streams:
                os.close(each)
            return None
        with suppress(FileNotFoundError):
            os.utime(self._address)
        pid = os.fork()
        if not pid:
            # said here, before the command begins: a launcher that hears of no process starts another
            send_answer(connection, pid=os.getpid())
            self._selector.close()
            connection.close()
            if self._listener is not None:
                self._listener.close()
            for process, other in self._processes.items():
                os.close(process)
                other[1].close()
            return request, streams
        for each in streams:
            os.close(each)
        self._watch(pid, connection)
        return None

    def _watch(self, pid: int, connection: socket.socket) -> None:
        process = os.pidfd_open(pid)
        self._processes[process] = (pid, connection)
        self._selector.register(process, selectors.EVENT_READ, self._ended)
        self._selector.register(connection, selectors.EVENT_READ, self._left)

    def _ended(self, process: int) -> None:
        pid, connection = self._processes.pop(process)
        _, status = os.waitpid(pid, 0)
        self._last_process = self._clock()
        self._selector.unregister(process)
        os.close(process)
        if connection.fileno() >= 0:
            self._selector.unregister(connection)
            send_answer(connection, status=os.waitstatus_to_exitcode(status))
            connection.close()

    def _left(self, connection: socket.socket) -> None:
        """End the process of a launcher that has died: Ray knows the launcher until the process has reported to it."""
        if connection.fileno() < 0:
            return  # closed by the event before
        self._selector.unregister(connection)
        process = next(process for process, (_, other) in self._processes.items() if other is connection)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        connection.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            if self._is_reachable():
                self._address.unlink()

    def _is_reachable(self) -> bool:
        """Return whether the address still leads here, and not to nothing or to a server that took it over."""
        return self._address.exists() and self._address.stat().st_ino == self._socket


def _memory_is_short() -> bool:
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(sizes[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    return available < _MIN_MEMORY * total
