"""Programs, their limits, how they ended, and the messages that carry them.

A message on a stream is a header in JSON, and the bytes that follow it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rl_envs.sandbox.relay import Relay

Isolation = Literal["namespaces", "landlock", "limits"]
"""Levels of isolation, strongest first."""

Ending = Literal["exit", "signal", "deadline", "cpu", "memory", "processes", "output"]
"""Reason for the end of a program: itself, a signal, or a limit."""
_LENGTH = struct.Struct("!I")
MAX_FRAME = 2**28
"""Maximum number of bytes of a message."""
MAX_HEADER = 2**20
"""Maximum number of bytes of a header."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program, set before its first line runs.

    Args:
        cpu_s: Maximum number of seconds of CPU of each of its processes, rounded up to whole seconds.
        wall_s: Maximum number of seconds until it is killed.
        memory_mib: Maximum address space of each process, and maximum memory of all of them together: resident and
            swapped memory, and the kernel's memory for their page tables, descriptors and threads.
        scratch_mib: Size of its scratch folder.
        processes: Maximum number of processes and threads at one time.
        open_files: Maximum number of descriptors of each process.
        output_kib: Maximum output on stdout, and on stderr; it is killed when it writes more.
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_mib: int = 1024
    scratch_mib: int = 64
    processes: int = 16
    open_files: int = 64
    output_kib: int = 1024

    @property
    def max_tasks(self) -> int:
        """Maximum number of processes and threads of a program's user, including up to four of its sandbox."""
        return self.processes + 4


@dataclass(frozen=True)
class Program:
    """A Python program, or a command.

    Args:
        source: Text of the program, run as `__main__`; empty for a command.
        stdin: Its whole input.
        files: Contents of files in its scratch folder, its current one, by name; names have no slashes.
        interactive: True if more is written to its stdin, and its output passed on, while it runs.
        command: Command to run instead of `source`. `python FILE`, `python -m MODULE` and `python -c CODE`, each with
            arguments, run in the interpreter that is there; others need a sandbox with folders of commands.
        variables: Environment variables in addition to `HOME`, `TMPDIR` and `LANG`.
        tree: Tar archive that is unpacked into the scratch folder; empty for none.
        folder: Starting folder of the program in the scratch folder; empty for the scratch folder itself.
        snapshot: Folder of the scratch folder that is read when all processes of the program have ended, `.` for the
            whole folder; None to read nothing.
        relay: The one address that the program may reach; None for no network.
        has_network: True if a program without a relay must reach addresses outside its machine. This and the next
            two are for machines of services only.
        image: Image of its machine; empty for the image of the settings.
        place: Absolute folder of the image which `folder` stands for; empty for none. Arguments and variables may then
            begin with `~/`, the scratch folder.
    """

    source: str = ""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    interactive: bool = False
    command: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    tree: bytes = b""
    folder: str = ""
    snapshot: str | None = None
    relay: Relay | None = None
    has_network: bool = False
    image: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        for name in self.files:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"a file of a program needs a plain name without slashes, got {name!r}")


@dataclass(frozen=True)
class Outcome:
    """A program's end and its output.

    Args:
        ending: Reason for its end.
        exit_code: 0 to 255 if it ended by itself; None otherwise.
        signal: Number of the signal that ended it; None otherwise.
        stdout: Its output, cut at the limit.
        stderr: Its output of errors, cut at the limit.
        seconds: Seconds from the request to the end.
        is_complete: True if a command in Python came to its end, rather than to `os._exit` or to `sys.exit` in another
            of its own files than the main one; False for anything else.
        snapshot: Tar archive of `Program.snapshot`; empty if it was not asked for or is not usable.
        snapshot_problem: Reason why there is no snapshot; empty if there is one, or none was asked for.
    """

    ending: Ending
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    is_complete: bool = False
    snapshot: bytes = b""
    snapshot_problem: str = ""

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself with exit code 0."""
        return self.ending == "exit" and self.exit_code == 0

    @property
    def out_of_memory(self) -> bool:
        """Return whether it was killed for its memory, or Python could not allocate more."""
        return self.ending == "memory" or self.last_words.startswith("MemoryError")

    @property
    def last_words(self) -> str:
        """Last line of its stderr that is not empty."""
        lines = self.stderr[-2000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def describe(self, limits: Limits) -> str:
        """Describe its end in words."""
        match self.ending:
            case "exit" if self.exit_code == 0:
                return "it ended"
            case "exit":
                words = f": {self.last_words[:300]}" if self.last_words else ""
                return f"it ended with exit code {self.exit_code}{words}"
            case "signal":
                return f"it was ended by signal {self.signal}"
            case "deadline":
                return f"it ran for longer than {limits.wall_s:g} s"
            case "cpu":
                return f"it used more than {limits.cpu_s:g} s of CPU"
            case "memory":
                return f"it used more than {limits.memory_mib} MiB of memory"
            case "processes":
                return f"it had more than {limits.processes} processes and threads"
            case "output":
                return f"it wrote more than {limits.output_kib} KiB"


def request_of(program: Program, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
    """Return a program as a plain header and the bytes that follow it, for `program_of`."""
    fields = ("interactive", "folder", "snapshot")
    header = {
        **{name: getattr(program, name) for name in fields},
        "limits": asdict(limits),
        "files": list(program.files),
        "command": list(program.command),
        "variables": dict(program.variables),
        "relay": None if program.relay is None else asdict(program.relay),
    }
    return header, [program.source.encode(errors="replace"), program.stdin, program.tree, *program.files.values()]


def program_of(header: Mapping[str, Any], parts: list[bytes]) -> tuple[Program, Limits]:
    """Return the program and the limits of a request of `request_of`."""
    source, stdin, tree, *contents = parts
    program = Program(
        source.decode(),
        stdin,
        files=dict(zip(header["files"], contents, strict=True)),
        interactive=header["interactive"],
        command=tuple(header["command"]),
        variables=header["variables"],
        tree=tree,
        folder=header["folder"],
        snapshot=header["snapshot"],
        relay=None if header["relay"] is None else Relay(**header["relay"]),
    )
    return program, Limits(**header["limits"])


class MalformedFrame(ConnectionError):
    """Raised if the other side sent something else than a message, or a message that is too large."""


class StreamClosed(ConnectionError):
    """Raised if the other side closed the stream."""


def write_frame(connection: socket.socket, header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> None:
    """Send one message; blocks until the other side has taken it."""
    connection.sendall(encoded_frame(header, parts))


def encoded_frame(header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """Return the bytes of one message."""
    head = json.dumps({**header, "parts": [len(part) for part in parts]}).encode()
    if len(head) > MAX_HEADER:
        raise ValueError(f"a program may have fewer files: their names take {len(head)} bytes, more than {MAX_HEADER}")
    size = len(head) + sum(map(len, parts))
    if size > MAX_FRAME:
        raise ValueError(f"a program, its input and its files may have {MAX_FRAME} bytes together, got {size}")
    return b"".join((_LENGTH.pack(len(head)), head, *parts))


def read_frame(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one message.

    Raises:
        StreamClosed: If the other side closed the stream.
        MalformedFrame: If it is not a message of at most `MAX_FRAME` bytes.
    """
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > MAX_HEADER:
        raise MalformedFrame(f"a header has at most {MAX_HEADER} bytes, got {size}")
    try:
        header = json.loads(_exactly(connection, size))
    except (ValueError, RecursionError):
        raise MalformedFrame("the header is not JSON") from None
    lengths = header.pop("parts", None) if isinstance(header, dict) else None
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise MalformedFrame("the header does not have the lengths of its parts")
    if size + sum(lengths) > MAX_FRAME:
        raise MalformedFrame(f"a message has at most {MAX_FRAME} bytes, got {size + sum(lengths)}")
    return header, [_exactly(connection, length) for length in lengths]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), 2**20))
        if not chunk:
            raise StreamClosed("the other side closed the stream")
        received += chunk
    return bytes(received)


class Cancellation:
    """Ends the programs that run under it, and those that would be started later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], object] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the program that runs; the thread that waits for it gets a `SandboxFailed`."""
        with self._lock:
            self.is_cancelled = True
            if self._end is not None:
                self._end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Call a function if this is cancelled while the context lasts, or was before."""
        with self._lock:
            self._end = end
            if self.is_cancelled:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None


def shut(connection: socket.socket) -> None:
    """Shut a connection down in both directions, if it is still open."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
