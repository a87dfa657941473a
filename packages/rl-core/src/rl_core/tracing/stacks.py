"""Stacks of this process in a file, on a signal, whatever its threads are doing.

The handler is C code that needs neither the interpreter's lock nor the event loop, so a process that hangs in native
code or holds the lock is shown as well. The first line of the file identifies its process, and an open descriptor of
the file shows that the process listens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from rl_core.tracing.spans import machine_clock

SIGNAL = signal.SIGRTMIN + 3
"""Asks for the stacks. Unlike SIGUSR1 and SIGUSR2 it has no other meaning in workers, engines and environments."""

PREFIX_VARIABLE = "RL_STACKS_PREFIX"
"""Where child processes write theirs; set by `write_stacks_of`."""

FOLDER = "stacks"
"""Folder of the files, in the folder of a run's logs."""

SUFFIX = ".stacks"
"""Ending of the file that a process writes its stacks to."""

_descriptors: list[int] = []
"""The open file, if there is one."""


def write_stacks_of(name: str, folder: Path, *, node: str = "") -> Path:
    """Write the stacks of all threads of this process to a file of a folder whenever it gets `SIGNAL`.

    Child processes that call `write_stacks_of_child` use the same folder.

    Args:
        name: Name of the process, such as `policy-0`.
        folder: Made if it does not exist.
        node: Ray's id of the node, if it is a process of Ray.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[PREFIX_VARIABLE] = str(folder / name)
    path = folder / f"{name}.{os.getpid()}{SUFFIX}"
    header = {"name": name, "pid": os.getpid(), "host": socket.gethostname(), "machine": machine_clock(), "node": node}
    path.write_text(json.dumps(header) + "\n", encoding="utf-8")
    # Appended to, so that whoever asks can cut the file; open as long as the process.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    for earlier in _descriptors:
        os.close(earlier)
    _descriptors[:] = [descriptor]
    return path


def write_stacks_of_child(name: str) -> None:
    """Write the stacks of a process that a worker has started, with the worker's name in front; do nothing outside a
    run, or if the file cannot be written.
    """
    prefix = os.environ.get(PREFIX_VARIABLE)
    if prefix:
        path = Path(prefix)
        with suppress(OSError):
            write_stacks_of(f"{path.name}.{name}", path.parent)


def stop_writing_stacks(path: Path) -> None:
    """Forget `SIGNAL` and remove the file."""
    faulthandler.unregister(SIGNAL)
    while _descriptors:
        os.close(_descriptors.pop())
    os.environ.pop(PREFIX_VARIABLE, None)
    path.unlink(missing_ok=True)
