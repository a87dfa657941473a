"""The modules that a server has imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rl_core.usage.garbage import without_collections

_NEVER = "ray"
"""A package that reads, when it is imported, variables that differ between processes."""

_GPU_MEMORY = "/dev/nvidia-uvm"
"""Open in a process that has initialised CUDA, whose forks cannot use it."""


def import_all(modules: Sequence[str]) -> str:
    """Import modules. Returns why this process must not be forked any more, empty if it may be."""
    with without_collections():
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - the process that imports it again tells the user
                return f"{module} cannot be imported: {error!r}"
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd_open"
    if _NEVER in sys.modules:
        return f"{', '.join(modules)} imports {_NEVER}"
    if any(_target(link).startswith(_GPU_MEMORY) for link in Path("/proc/self/fd").iterdir()):
        return f"{', '.join(modules)} initialises CUDA"
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{', '.join(modules)} starts {threads - 1} threads"
    return ""


class Imported:
    """What this process has imported: the files, and the environment variables that were read meanwhile."""

    def __init__(self, modules: Sequence[str]) -> None:
        # imports may set variables themselves
        given = os.environ.copy()
        with _recorded_reads() as read:
            self.refusal = import_all(modules)
            """Why this process must not be forked, empty if it may be."""
        self._variables = {name: given.get(name) for name in read - _OF_TERMINALS}
        paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # a folder changes when a package is installed into it or removed from it
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
    """Record the names of environment variables that Python code reads by name; copies of all do not count."""
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
            # whoever copies all variables asks for their values in order
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


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
