"""Stacks of the processes of a run on one machine.

Standard library only: `rl stacks` sends this module by value to the other nodes of a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ANSWER_S = 3.0
"""Maximum time in seconds for the stacks of a process. The handler is C code, which takes milliseconds."""

_POLL_S = 0.05
_SAMPLE_S = 0.3
_PY_SPY_TIMEOUT_S = 30.0
_NOTHING_WRITTEN = (
    "It wrote no stacks. A process in state D waits in the kernel, often for a file system or a device; one in state T "
    "is stopped."
)


@dataclass(frozen=True)
class ProcessStacks:
    """One process and its stacks.

    Args:
        name: Its name, such as `policy-0`; a child of a worker has the worker's name in front.
        pid: Its number on its machine.
        host: Its machine.
        state: Its state, in words.
        text: The stacks of all threads, or why there are none.
    """

    name: str
    pid: int
    host: str
    state: str
    text: str


class Registered(NamedTuple):
    """A process that writes its stacks on request: the first line of its file, and the file."""

    name: str
    pid: int
    host: str
    node: str
    path: str
    header_bytes: int


def registered(folder: str, suffix: str) -> list[Registered]:
    """Return the processes that have a file in a folder, on all machines, those that have ended included."""
    found = []
    for path in sorted(Path(folder).glob(f"*{suffix}")):
        with suppress(OSError, ValueError, KeyError):
            with path.open("rb") as file:
                line = file.readline()
            header = json.loads(line)
            name, pid, host, node = (header[key] for key in ("name", "pid", "host", "node"))
            found.append(Registered(name, pid, host, node, str(path), len(line)))
    return found


def is_here(process: Registered) -> bool:
    """Return whether the process lives on this machine: it has its file open."""
    try:
        wanted = Path(process.path).stat()
        descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def signal_here(path: str, signal_number: int) -> bool:
    """Send a signal to the process of a file, if it lives on this machine; returns whether it does."""
    for process in registered(str(Path(path).parent), Path(path).suffix):
        if process.path == path and is_here(process):
            os.kill(process.pid, signal_number)
            return True
    return False


def stacks_here(
    folder: str, suffix: str, signal_number: int, *, py_spy: str = "", is_native: bool = False
) -> list[ProcessStacks]:
    """Return the stacks of the run's processes on this machine, and the state of processes that they have started.

    Args:
        folder: Folder of the files.
        suffix: Ending of their names.
        signal_number: Signal that asks for the stacks; only a process that handles it gets it.
        py_spy: Path of py-spy, which also shows which thread holds the GIL; empty to do without.
        is_native: Have py-spy show native frames as well.
    """
    here = [process for process in registered(folder, suffix) if is_here(process)]
    before = {process.pid: _cpu_s(process.pid) for process in here}
    began = time.monotonic()
    for process in here:
        with suppress(OSError):
            os.truncate(process.path, process.header_bytes)
            if _handles(process.pid, signal_number):
                os.kill(process.pid, signal_number)
    found = {process.pid: _answer(process, began + ANSWER_S) for process in here}
    time.sleep(max(0.0, began + _SAMPLE_S - time.monotonic()))
    elapsed = time.monotonic() - began
    stacks = []
    for process in here:
        state = _state(process.pid, (_cpu_s(process.pid) - before[process.pid]) / elapsed)
        text = (_py_spy(py_spy, process.pid, is_native=is_native) if py_spy else "") or found[process.pid]
        stacks.append(ProcessStacks(process.name, process.pid, process.host, state, text or _NOTHING_WRITTEN))
    return stacks + list(_others(here))


def _answer(process: Registered, deadline: float) -> str:
    """Return the output of the process, once it writes nothing more."""
    size = process.header_bytes
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        written = Path(process.path).stat().st_size
        if written == size > process.header_bytes:
            break
        size = written
    with Path(process.path).open("rb") as file:
        file.seek(process.header_bytes)
        return file.read().decode(errors="replace").strip("\n")


def _handles(pid: int, signal_number: int) -> bool:
    """Return whether a process has a handler of a signal, which would end it otherwise."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def _py_spy(program: str, pid: int, *, is_native: bool) -> str:
    """Return the stacks as py-spy shows them; empty if it may not read the process."""
    command = [program, "dump", "--pid", str(pid), *(["--native"] if is_native else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip("\n") if done.returncode == 0 else ""


def _others(here: Sequence[Registered]) -> Iterator[ProcessStacks]:
    """Yield processes without stacks that workers have started: schedulers of engines, sandboxes, compilers."""
    names = {process.pid: process for process in here}
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parents[int(path.name)] = int(_stat(int(path.name))[1])
    for pid in sorted(parents):
        above = parents[pid]
        while above > 1 and above not in names:
            above = parents.get(above, 0)
        worker = names.get(above)
        # The driver's children are Ray's processes, and workers of the run.
        if pid in names or worker is None or worker.name == "driver":
            continue
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if command:
                yield ProcessStacks(f"{worker.name}, child", pid, worker.host, _state(pid, None), command[:500])


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(pid: int, cores: float | None) -> str:
    try:
        letter = _stat(pid)[0]
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    except OSError:
        return "has ended"
    words = {
        "R": "running",
        "S": "waiting",
        "D": "waiting in the kernel, cannot be interrupted (state D)",
        "T": "stopped (state T)",
        "t": "stopped by a debugger",
        "Z": "ended, not collected by its parent",
    }
    text = words.get(letter, f"state {letter}")
    if cores is not None and cores >= 0.05:
        return f"computing, {cores:.1f} cores"
    return f"{text} in {place}" if place and letter in "DS" else text
