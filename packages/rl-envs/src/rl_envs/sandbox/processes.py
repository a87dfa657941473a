"""The processes that a process started, and their memory, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Container, Iterator
from dataclasses import dataclass

_HELD = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:", b"HugetlbPages:")
_TASK_BYTES = 2**15
"""Bytes of the kernel for a thread: its stack and its record."""
_LOCK_BYTES = 2**18
"""Bytes of the machine's list of locks that are read."""


@dataclass(frozen=True)
class Usage:
    """What processes hold.

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
        # no descriptor has more in its buffer than a socket: programs cannot enlarge it, and that of a pipe is smaller
        with socket.socket(socket.AF_UNIX) as any_socket:
            self._descriptor_bytes = any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def descendants(self) -> Iterator[int]:
        """Process ids of children, their children and so on."""
        return (pid for pid, _ in self._tree(os.getpid()) if pid != os.getpid())

    def usage(self, first: int) -> Usage:
        """What a process's descendants hold together; memory that several share counts for each."""
        found = dict(self._tree(first))
        unseen = frozenset(pid for pid, threads in found.items() if not threads)
        del found[first]
        tasks = sum(map(len, found.values()))
        memory = sum(
            self._memory(pid, threads) + self._descriptors(pid) * self._descriptor_bytes
            for pid, threads in found.items()
        )
        return Usage(memory + tasks * _TASK_BYTES, tasks, self._locks(found), unseen)

    def end_descendants(self) -> None:
        """Kill all descendants, also those that come in between, and wait for their end.

        This process must be the one that adopts orphans.
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
        """Bytes of a process, as one of its threads shows them: one that has ended, even the first, shows none."""
        for thread in threads:
            lines = self._read(f"{pid}/task/{thread}/status").splitlines()
            if sizes := [int(line.split()[1]) for line in lines if line.startswith(_HELD)]:
                return 1024 * sum(sizes)
        return 0

    def _descriptors(self, pid: int) -> int:
        """Number of open descriptors, which is the size of their folder since Linux 6.2."""
        try:
            return os.stat(f"{pid}/fd", dir_fd=self._proc).st_size or len(self._entries(f"{pid}/fd"))
        except OSError:  # it ended
            return 0

    def _locks(self, pids: Container[int]) -> int:
        """Number of locks of records of files, among the first on the list of the machine."""
        try:
            descriptor = os.open("locks", os.O_RDONLY, dir_fd=self._proc)
        except OSError:  # a kernel without them
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
        except OSError:  # it ended
            return []
        finally:
            os.close(folder)

    def _read(self, path: str) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(descriptor, 2**16)
        except OSError:  # it ended
            return b""
        finally:
            os.close(descriptor)
