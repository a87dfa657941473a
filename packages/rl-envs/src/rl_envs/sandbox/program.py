"""Programs, their limits, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rl_envs.sandbox.relay import Relay

Isolation = Literal["namespaces", "landlock", "limits"]
"""Levels of isolation, strongest first."""

Ending = Literal["exit", "signal", "deadline", "cpu", "memory", "processes", "output"]
"""Why a program ended: by itself, by a signal, or at a limit."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program, set before its first line runs.

    Args:
        cpu_s: Maximum number of seconds of CPU of each of its processes, rounded up to whole seconds.
        wall_s: Maximum number of seconds until it is killed.
        memory_mib: Maximum address space of each process, and maximum memory of all of them together: what is resident,
            swapped out, or the kernel's for their page tables, descriptors and threads.
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
    def most_tasks(self) -> int:
        """Maximum number of processes and threads of a program's user; those of its sandbox are up to four."""
        return self.processes + 4


@dataclass(frozen=True)
class Program:
    """A Python program, or a command.

    Args:
        source: Text of the program, run as `__main__`; empty for a command.
        stdin: All that it can read.
        files: Contents of files in its scratch folder, its current one, by name; names have no slashes.
        interactive: True if more is written to its stdin, and its output passed on, while it runs.
        command: Command to run instead of `source`. `python FILE`, `python -m MODULE` and `python -c CODE`, each with
            arguments, run in the interpreter that is there; others need a sandbox with folders of commands.
        variables: Environment variables in addition to `HOME`, `TMPDIR` and `LANG`.
        tree: Tar archive that is unpacked into the scratch folder; empty for none.
        folder: Folder of the scratch folder in which the program starts; empty for the scratch folder itself.
        snapshot: Folder of the scratch folder that is read when all processes of the program have ended, `.` for all of
            it; None to read nothing.
        relay: The one address that the program may reach; None for no network.
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

    def __post_init__(self) -> None:
        for name in self.files:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"a file of a program needs a plain name without slashes, got {name!r}")


@dataclass(frozen=True)
class Outcome:
    """A program's end and its output.

    Args:
        ending: Why it ended.
        exit_code: 0 to 255 if it ended by itself; None otherwise.
        signal: Number of the signal that ended it; None otherwise.
        stdout, stderr: its output, cut at the limit.
        seconds: Seconds from the request to the end.
        is_complete: True if a command in Python came to its end, rather than by `os._exit` or by `sys.exit` in another
            of its own files than the main one; False for anything else.
        snapshot: Tar archive of `Program.snapshot`; empty if it was not asked for or is not usable.
        snapshot_problem: Why there is no snapshot; empty if there is one, or none was asked for.
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
        """How it ended, in words."""
        match self.ending:
            case "exit" if self.exit_code == 0:
                return "it ended"
            case "exit":
                said = f": {self.last_words[:300]}" if self.last_words else ""
                return f"it ended with exit code {self.exit_code}{said}"
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
    """A program as a plain header and the bytes that follow it, as `program_of` reads them."""
    header = {
        "limits": asdict(limits),
        "files": list(program.files),
        "interactive": program.interactive,
        "command": list(program.command),
        "variables": dict(program.variables),
        "folder": program.folder,
        "snapshot": program.snapshot,
        "relay": None if program.relay is None else asdict(program.relay),
    }
    return header, [program.source.encode(errors="replace"), program.stdin, program.tree, *program.files.values()]


def program_of(header: Mapping[str, Any], parts: list[bytes]) -> tuple[Program, Limits]:
    """Inverse of `request_of`."""
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
