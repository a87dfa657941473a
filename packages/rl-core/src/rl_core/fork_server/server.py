"""The server: imports modules once and forks a process for every request.

A connection goes through these steps: it is accepted, its request is received, and a fork becomes the process that was
asked for. The server then watches the process and the connection: it reports the status when the process ends, and ends
the process if the other side of the connection has gone.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_core.fork_server.request import STREAMS, connected, receive_request, send_answer
from rl_core.usage.garbage import without_collections

_CHECK_PERIOD_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
MAX_SERVERS = 6
"""Maximum number of servers of one user on one machine. Each takes up to a gigabyte."""

_MIN_MEMORY = 0.1
"""Share of the machine's memory below which an idle server ends at once."""


def main(address: str, modules: Sequence[str], idle_s: float) -> None:
    """Listen at an address, unless another server does, and serve there in a process that belongs to nobody.

    The call returns in the first process at once, in the server when it is idle, and in its forks after their work.
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
                # Its server was killed.
                path.unlink()
        if address.exists():
            return None
        # A server whose socket is gone takes no requests, and ends when its processes have. The time of a socket is the
        # time of its last request.
        for path in sorted(filter(Path.exists, others), key=lambda path: path.stat().st_mtime)[: 1 - MAX_SERVERS]:
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(1024)
        return listener


class Server:
    """Forks this process for those who connect.

    Args:
        listener: Socket that listens at the address.
        address: Path of the socket.
        modules: Modules to import first.
        idle_s: Seconds without a process until the server ends.
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

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Serve until idle or out of date. In a fork it returns the request and its streams."""
        while self._listener is not None or self._processes:
            asked = self.handle(_CHECK_PERIOD_S)
            if asked is not None:
                return asked
        return None

    def handle(self, timeout_s: float) -> tuple[dict[str, Any], list[int]] | None:
        """Handle the next events, and stop listening if idle. In a fork it returns as `serve` does.

        Only processes of this server count as work: every server that starts connects to all others.
        """
        for key, _ in self._selector.select(timeout_s):
            asked = key.data(key.fileobj)
            if asked is not None:
                return asked
        if not self._processes:
            sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            available, total = (int(sizes[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
            if self._clock() - self._last_process >= self._idle_s or available < _MIN_MEMORY * total:
                self._stop_listening()
        if not self._is_reachable():
            self._stop_listening()
        return None

    def _accept(self, listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        if listener.fileno() < 0:
            return None  # The event before closed it.
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
        if refusal or self._imported.differs(request["variables"]):
            if not refusal:
                # The next request starts a server with the present files and variables.
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
            # The answer comes before the command begins: a launcher that hears of no process starts another.
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
        process = os.pidfd_open(pid)
        self._processes[process] = (pid, connection)
        self._selector.register(process, selectors.EVENT_READ, self._ended)
        self._selector.register(connection, selectors.EVENT_READ, self._left)
        return None

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
            return  # The event before closed it.
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


def become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Run a request's command in this process, as `python COMMAND` would.

    Raises:
        SystemExit, Exception: As the command does.
    """
    os.setsid()
    for stream, file in zip(STREAMS, streams, strict=True):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    # NumPy draws the seed of its global generator when it is imported. Python's own generator is seeded after a fork,
    # and the generator of torch starts from the same seed in every process.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    first, *arguments = request["command"]
    if first == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
        return
    sys.argv = [first, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
    runpy.run_path(first, run_name="__main__")


_NEVER = "ray"
"""A package that reads, when it is imported, variables that differ between processes."""

_GPU_MEMORY = "/dev/nvidia-uvm"
"""Open in a process that has initialised CUDA, whose forks cannot use it."""


def import_all(modules: Sequence[str]) -> str:
    """Import modules, and return the reason that this process must not be forked any more; empty if it may be."""
    with without_collections():
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - the process that imports it again shows the error
                return f"{module} cannot be imported: {error!r}"
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd_open"
    if _NEVER in sys.modules:
        return f"{', '.join(modules)} imports {_NEVER}"
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith(_GPU_MEMORY):
                return f"{', '.join(modules)} initialises CUDA"
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    # Libraries that allow for forks, such as OpenBLAS, have ended their threads before this one.
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{', '.join(modules)} starts {threads - 1} threads"
    return ""


class Imported:
    """The files that this process has imported, and the environment variables that were read meanwhile."""

    def __init__(self, modules: Sequence[str]) -> None:
        # Imports may set variables themselves.
        given = os.environ.copy()
        with _recorded_reads() as read:
            self.refusal = import_all(modules)
            """The reason that this process must not be forked; empty if it may be."""
        self._variables = {name: given.get(name) for name in read - _OF_TERMINALS}
        paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # A folder changes when a package is installed into it or removed from it.
        paths.update(entry for entry in sys.path if os.path.isdir(entry))
        self._seen = {path: _state(path) for path in paths if path}

    def differs(self, variables: Mapping[str, str]) -> bool:
        """Return whether an import by a process with these variables would find other files or values now."""
        return any(variables.get(name) != value for name, value in self._variables.items()) or any(
            _state(path) != state for path, state in self._seen.items()
        )


_OF_TERMINALS = frozenset({"COLUMNS", "LINES", "PATH"})
"""Variables that imports look at, and that change nothing that outlives them: the width of help texts, and the place of
CUDA's compiler, which only processes with GPUs need and which have no server."""


@contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """Record which environment variables Python code reads one by one; copies of all do not count."""
    read = set[str]()
    copied = deque[str]()
    kind = type(os.environ)

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[str]:
            copied.clear()
            for key in super().__iter__():
                copied.append(key)
                yield key

        def __getitem__(self, key: str) -> str:
            # A copy of all variables asks for their values in order.
            if copied and copied[0] == key:
                copied.popleft()
            else:
                copied.clear()
                read.add(key)
            return str(super().__getitem__(key))

    os.environ.__class__ = Recorded
    try:
        yield read
    finally:
        os.environ.__class__ = kind


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
