"""The processes that a process started, and their memory, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


class ProcessTable:
    """The descendants of this process, even of one that has another root since."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def descendants(self) -> Iterator[int]:
        """Process ids of children, their children and so on."""
        waiting = [os.getpid()]
        while waiting:
            children = self._children(waiting.pop())
            yield from children
            waiting += children

    def memory_of_descendants(self) -> int:
        """Bytes of memory that is not a file's, of all descendants together; shared memory counts for each."""
        return sum(map(self._memory, self.descendants()))

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

    def _children(self, pid: int) -> list[int]:
        """Children of all threads of a process."""
        try:
            folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            threads = os.listdir(folder)
        except OSError:  # it ended
            return []
        finally:
            os.close(folder)
        return [int(child) for thread in threads for child in self._read(f"{pid}/task/{thread}/children").split()]

    def _memory(self, pid: int) -> int:
        lines = self._read(f"{pid}/status").splitlines()
        sizes = (line.split()[1] for line in lines if line.startswith((b"RssAnon", b"RssShmem")))
        return 1024 * sum(map(int, sizes))

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
