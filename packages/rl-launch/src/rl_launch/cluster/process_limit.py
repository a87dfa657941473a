"""Limits of processes and threads: Ray and every worker start dozens of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_core.errors import ConfigError

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_GROUPS_OF_THIS = Path("/proc/self/cgroup")

NODE_THREADS = 150
"""Threads of the driver, and of Ray's processes on one node of few cores."""

WORKER_THREADS = 45
"""Threads of one rank or replica."""


@dataclass(frozen=True)
class ProcessLimit:
    """A limit of processes and threads.

    Args:
        name: File or limit that sets it.
        most: Maximum number of processes and threads.
        used: Number of existing processes and threads.
    """

    name: str
    most: int
    used: int

    @property
    def free(self) -> int:
        """Number of processes and threads that may still be started."""
        return self.most - self.used

    def __str__(self) -> str:
        return f"{self.name} allows {self.most} processes and threads, and {self.used} exist"


def process_limit() -> ProcessLimit | None:
    """Return the tightest limit of this process; None if there is none."""
    found = [*_of_control_groups(), *_of_user()]
    return min(found, key=lambda each: each.free) if found else None


def check_process_limit(num_nodes: int, num_workers: int) -> None:
    """Refuse to start Ray and workers beyond the limit, because a refused thread ends them without a message.

    Raises:
        ConfigError: With the limit.
    """
    limit, needed = process_limit(), threads_of(num_nodes, num_workers)
    if limit is not None and limit.free < needed:
        raise ConfigError(f"{limit}, but the run starts at least {needed} more. {remedy(limit)}")


def threads_of(num_nodes: int, num_workers: int) -> int:
    """Return the minimum number of threads of nodes and workers on this machine."""
    return NODE_THREADS * num_nodes + WORKER_THREADS * num_workers


def remedy(limit: ProcessLimit) -> str:
    """Return how to raise a limit."""
    if limit.name.startswith("RLIMIT"):
        return "Raise it with ulimit -u, or end other processes of this user."
    return "Raise the limit of the container or of the batch job, such as docker run --pids-limit."


def _of_control_groups() -> Iterator[ProcessLimit]:
    for line in _GROUPS_OF_THIS.read_text().splitlines() if _GROUPS_OF_THIS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = _CONTROL_GROUPS / controllers
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                most, used = ((folder / name).read_text().strip() for name in ("pids.max", "pids.current"))
                yield ProcessLimit(f"{folder / 'pids.max'}", int(most), int(used))
            if folder == root:
                break


def _of_user() -> Iterator[ProcessLimit]:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = os.getuid()
    # The kernel does not apply the limit to the administrator.
    if most == resource.RLIM_INFINITY or not user:
        return
    own = (each.info for each in psutil.process_iter(["uids", "num_threads"]))
    used = sum(info["num_threads"] or 0 for info in own if info["uids"] and info["uids"].real == user)
    yield ProcessLimit("RLIMIT_NPROC (ulimit -u)", most, used)
