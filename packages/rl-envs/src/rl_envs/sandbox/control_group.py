"""Control groups (cgroup v2): the kernel's limits of a whole program, where the machine lets this process make groups.

https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator

from rl_envs.sandbox.program import Limits

_PREFIX = "rl-sandbox-"
_CONTROLLERS = {"memory", "pids"}
_ROOM_MIB = 32
"""Memory of the kernel for a program, which counts for its group and not for the program."""
_ABANDONED_S = 60.0
"""Age of a group without processes that no sandbox is about to use."""


class ControlGroup:
    """The group of one program. It must be made before its keeper enters namespaces, which hide it.

    Args:
        parent: Descriptor of the folder, as `delegated` returns it.
        limits: Limits of the program.
    """

    def __init__(self, parent: int, limits: Limits) -> None:
        self._parent, self._name = parent, f"{_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(self._name, dir_fd=parent)
        # the files of a scratch folder in memory are charged to the group
        memory = (limits.memory_mib + limits.scratch_mib + _ROOM_MIB) * 2**20
        self._write("memory.max", memory)
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            self._write("memory.swap.max", 0)
        self._write("memory.oom.group", 1)
        self._write("pids.max", limits.most_tasks)
        self._processes = self._open("cgroup.procs", os.O_WRONLY)

    def join(self) -> None:
        """Put this process into the group, with all that it starts."""
        os.write(self._processes, b"0")

    def is_exhausted(self) -> bool:
        """Return whether a process was killed because the group had no memory left."""
        with open(self._open("memory.events", os.O_RDONLY)) as events:
            return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in events)

    def close(self) -> None:
        """Remove the group, whose processes must have ended."""
        os.close(self._processes)
        with contextlib.suppress(OSError):  # one is still ending; the next sandbox that starts removes the group
            os.rmdir(self._name, dir_fd=self._parent)

    def _open(self, file: str, flags: int) -> int:
        return os.open(f"{self._name}/{file}", flags | os.O_CLOEXEC, dir_fd=self._parent)

    def _write(self, file: str, value: int) -> None:
        with open(self._open(file, os.O_WRONLY), "w") as opened:
            opened.write(str(value))


def delegated() -> int | None:
    """Open the folder in which this process may make groups, and remove those that a crash left; None without one.

    It is the nearest group above this process that passes memory and processes on to its members. None that has a limit
    is left for it, and none of the machine's own root.
    """
    for folder in _groups_above():
        if set(_read(f"{folder}/cgroup.subtree_control").split()) >= _CONTROLLERS:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _can_be_used(descriptor):
                _sweep(descriptor)
                return descriptor
            os.close(descriptor)
            return None
        if _read(f"{folder}/memory.max").strip() not in ("", "max"):
            return None
    return None


def _groups_above() -> Iterator[str]:
    """The folder of this process's group and those above it, as far as they belong to this user or container."""
    own = next((line[3:].strip() for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    mounts = (line.split() for line in _read("/proc/self/mountinfo").splitlines())
    root, top = next(((fields[3], fields[4]) for fields in mounts if "cgroup2" in fields[6:]), ("", ""))
    path = os.path.relpath(own or "/", root or "/")
    # only the machine's root group has no type
    if not own or not root or path.startswith("..") or (os.geteuid() == 0 and not os.path.exists(f"{top}/cgroup.type")):
        return
    folder = os.path.normpath(f"{top}/{path}")
    while folder.startswith(top):
        yield folder
        folder = os.path.dirname(folder)


def _can_be_used(parent: int) -> bool:
    """Try a group with a process, which ends at once."""
    try:
        group = ControlGroup(parent, Limits())
    except OSError:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            group.join()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    group.close()
    return status == 0


def _sweep(parent: int) -> None:
    for name in os.listdir(parent):
        with contextlib.suppress(OSError):  # it has processes
            if name.startswith(_PREFIX) and time.time() - os.stat(name, dir_fd=parent).st_ctime > _ABANDONED_S:
                os.rmdir(name, dir_fd=parent)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
