"""Ends an engine's processes with the process they were started for, with nothing left in shared memory."""

from __future__ import annotations

import os
import select
import signal
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from threading import Thread

CPU_GROUPS = "/dev/shm/vllm_dist_"
"""Beginning of the names of the files through which tensor-parallel ranks on CPU reduce."""


def end_with(pid: int) -> None:
    """End this engine process, and the one above it that is not `pid` itself, as soon as process `pid` has ended.

    vLLM's engine core does not notice when the process in front of it is killed, and would keep its device for ever.
    """
    watched = os.pidfd_open(pid)
    parent = os.getppid()

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if parent not in (pid, 1):
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    Thread(target=wait, name="parent-watch", daemon=True).start()


def forget_semaphores() -> None:
    """Remove the names of this process's semaphores from shared memory, which a killed process does not.

    Every process that shares one has opened it by now.
    """
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]  # of Python's own use
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()


def forget_cpu_groups() -> None:
    """Remove the names of the memory that this rank shares with those of its tensor-parallel group.

    vLLM leaves them, however its engine ends. Every rank of the group has mapped the memory by now.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if path.startswith(CPU_GROUPS):
            Path(path).unlink(missing_ok=True)
