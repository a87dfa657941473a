"""The processes that a process started, and their memory, read from /proc; and their control groups.

A control group (cgroup v2) has the kernel's limits of a whole program, where the machine lets this process make groups:
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass

from rl_envs.sandbox.program import Limits

_HELD = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:", b"HugetlbPages:")
_TASK_BYTES = 2**15
"""Bytes of the kernel for a thread: its stack and its record."""
_LOCK_BYTES = 2**18
"""Bytes of the machine's list of locks that are read."""
_PREFIX = "rl-sandbox-"
_CONTROLLERS = {"memory", "pids"}
_ROOM_MIB = 32
"""Memory of the kernel for a program, which counts for its group and not for the program."""
_ABANDONED_S = 60.0
"""Age of a group without processes that no sandbox is about to use."""


@dataclass(frozen=True)
class SandboxUsage:
    """Memory, tasks and locks that processes hold.

    Args:
        memory: Bytes that are not a file's, including the kernel's for these processes.
        tasks: Number of processes and threads.
        locks: Number of locks of records of files.
        unseen: Process ids that end now, or that the machine hides from this user (`hidepid`).
    """

    memory: int
    tasks: int
    locks: int
    unseen: frozenset[int] = frozenset()


class ProcessTable:
    """The descendants of this process, even of one that has another root since."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # No descriptor has more in its buffer than a socket. Programs cannot enlarge it, and pipes have less.
        with socket.socket(socket.AF_UNIX) as any_socket:
            self._descriptor_bytes = any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def descendants(self) -> Iterator[int]:
        """Return the process ids of children, their children and so on."""
        return (pid for pid, _ in self._tree(os.getpid()) if pid != os.getpid())

    def usage(self, first: int) -> SandboxUsage:
        """Return the usage of a process's descendants together; memory that several share counts for each."""
        found = dict(self._tree(first))
        unseen = frozenset(pid for pid, threads in found.items() if not threads)
        del found[first]
        tasks = sum(map(len, found.values()))
        memory = tasks * _TASK_BYTES
        for pid, threads in found.items():
            # The size of their folder is the number of open descriptors since Linux 6.2.
            with contextlib.suppress(OSError):  # It ended.
                number = os.stat(f"{pid}/fd", dir_fd=self._proc).st_size or len(self._entries(f"{pid}/fd"))
                memory += number * self._descriptor_bytes
            memory += self._memory(pid, threads)
        return SandboxUsage(memory, tasks, self._locks(found), unseen)

    def end_descendants(self) -> None:
        """Kill all descendants, also descendants that start meanwhile, and wait for their end.

        This process must adopt orphans.
        """
        while True:
            for pid in list(self.descendants()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def write(self, path: str, text: str) -> None:
        """Write to a file of /proc."""
        descriptor = os.open(path, os.O_WRONLY, dir_fd=self._proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def _tree(self, first: int) -> Iterator[tuple[int, list[str]]]:
        """Yield a process and its descendants, each with its threads, which have children of their own."""
        waiting = [first]
        while waiting:
            pid = waiting.pop()
            threads = self._entries(f"{pid}/task")
            yield pid, threads
            for thread in threads:
                waiting += map(int, self._read(f"{pid}/task/{thread}/children").split())

    def _memory(self, pid: int, threads: list[str]) -> int:
        """Return the bytes of a process, read from any thread that lives: a thread that has ended shows none."""
        for thread in threads:
            lines = self._read(f"{pid}/task/{thread}/status").splitlines()
            if sizes := [int(line.split()[1]) for line in lines if line.startswith(_HELD)]:
                return 1024 * sum(sizes)
        return 0

    def _locks(self, pids: Container[int]) -> int:
        """Return the number of locks of records of files, among the first on the list of the machine."""
        try:
            descriptor = os.open("locks", os.O_RDONLY, dir_fd=self._proc)
        except OSError:  # The kernel has no such list.
            return 0
        with open(descriptor, "rb", buffering=_LOCK_BYTES) as table:
            fields = [line.split() for line in table.read(_LOCK_BYTES).splitlines()]
        return sum(len(each) > 4 and each[-4].isdigit() and int(each[-4]) in pids for each in fields)

    def _entries(self, path: str) -> list[str]:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(folder)
        except OSError:  # It ended.
            return []
        finally:
            os.close(folder)

    def _read(self, path: str) -> bytes:
        try:
            with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), "rb", buffering=0) as file:
                return file.read(2**16) or b""
        except OSError:  # It ended.
            return b""


class ControlGroup:
    """The group of one program. It must be made before its keeper enters namespaces, which hide it.

    Args:
        parent: Descriptor of the folder, from `delegated`.
        limits: Limits of the program.
    """

    def __init__(self, parent: int, limits: Limits) -> None:
        self._parent, self._name = parent, f"{_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(self._name, dir_fd=parent)
        # The files of a scratch folder in memory are charged to the group.
        memory = (limits.memory_mib + limits.scratch_mib + _ROOM_MIB) * 2**20
        self._write("memory.max", memory)
        with contextlib.suppress(FileNotFoundError):  # The kernel has no swap.
            self._write("memory.swap.max", 0)
        self._write("memory.oom.group", 1)
        self._write("pids.max", limits.max_tasks)
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
        with contextlib.suppress(OSError):  # One is still ending; the next sandbox that starts removes the group.
            os.rmdir(self._name, dir_fd=self._parent)

    def _open(self, file: str, flags: int) -> int:
        return os.open(f"{self._name}/{file}", flags | os.O_CLOEXEC, dir_fd=self._parent)

    def _write(self, file: str, value: int) -> None:
        with open(self._open(file, os.O_WRONLY), "w") as opened:
            opened.write(str(value))


def delegated() -> int | None:
    """Open the folder where this process may make groups, and remove groups that a crash left; None without one.

    It is the nearest group above this process that passes memory and processes on to its members. A process never
    leaves a group with a limit for it, and never uses the machine's own root.
    """
    for folder in _groups_above():
        if set(_read(f"{folder}/cgroup.subtree_control").split()) >= _CONTROLLERS:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not _can_be_used(descriptor):
                os.close(descriptor)
                return None
            for name in os.listdir(descriptor):
                with contextlib.suppress(OSError):  # It has processes.
                    created = os.stat(name, dir_fd=descriptor).st_ctime
                    if name.startswith(_PREFIX) and time.time() - created > _ABANDONED_S:
                        os.rmdir(name, dir_fd=descriptor)
            return descriptor
        if _read(f"{folder}/memory.max").strip() not in ("", "max"):
            return None
    return None


def _groups_above() -> Iterator[str]:
    """Yield the folder of this process's group and the folders above it that belong to this user or container."""
    own = next((line[3:].strip() for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    mounts = (line.split() for line in _read("/proc/self/mountinfo").splitlines())
    root, top = next(((fields[3], fields[4]) for fields in mounts if "cgroup2" in fields[6:]), ("", ""))
    path = os.path.relpath(own or "/", root or "/")
    # Only the machine's root group has no type.
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


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
