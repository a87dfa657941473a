"""The modules that a server has imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_core.imports import without_collections

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
    if (threads := _threads_that_outlive_forks()) > 1:
        return f"{', '.join(modules)} starts {threads - 1} threads"
    return ""


def _threads_that_outlive_forks() -> int:
    """Threads of this process after a fork, before which libraries that allow for it, such as OpenBLAS, end theirs."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))


class Files:
    """The files that this process has imported, as they were."""

    def __init__(self) -> None:
        paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        # a folder changes when a package is installed into it or removed from it
        paths.update(entry for entry in sys.path if os.path.isdir(entry))
        self._seen = {path: _state(path) for path in paths if path}

    def have_changed(self) -> bool:
        """Return whether an import would find other files now."""
        return any(_state(path) != state for path, state in self._seen.items())


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
