"""Use of cores and memory by a process with its descendants."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessUsage:
    """Use by a process, with its descendants such as the ranks of an engine.

    Args:
        cpu_cores: Number of cores in use, as a mean since the reading before, or since the start of the process.
        memory_bytes: Resident memory; pages that processes share count for each of them.
        gpu_memory_bytes: Memory on all GPUs; None if there are no GPUs, or the driver does not show these processes.
    """

    cpu_cores: float
    memory_bytes: int
    gpu_memory_bytes: int | None


class ProcessMeter:
    """Measures this process and its descendants from one reading to the next.

    Args:
        with_children: Count the descendants, too.
        clock: Seconds since the epoch.
    """

    def __init__(self, *, with_children: bool = True, clock: Callable[[], float] = time.time) -> None:
        self._with_children = with_children
        self._clock = clock
        self._cpu_s: Mapping[int, float] = {}
        self._read_at: float | None = None

    def read(self, gpu_memory_by_pid: Mapping[int, int] | None) -> ProcessUsage:
        """Use since the last call.

        Args:
            gpu_memory_by_pid: Bytes of GPU memory of each process of the machine; None if it has no GPUs.
        """
        cpu_s: dict[int, float] = {}
        memory_bytes = 0
        for pid, seconds, resident in _processes(with_children=self._with_children):
            cpu_s[pid] = seconds
            memory_bytes += resident
        now = self._clock()
        passed_s = now - (psutil.Process().create_time() if self._read_at is None else self._read_at)
        used_s = sum(max(0.0, seconds - self._cpu_s.get(pid, 0.0)) for pid, seconds in cpu_s.items())
        self._cpu_s, self._read_at = cpu_s, now
        shown = [gpu_memory_by_pid[pid] for pid in cpu_s if pid in gpu_memory_by_pid] if gpu_memory_by_pid else []
        return ProcessUsage(
            cpu_cores=used_s / passed_s if passed_s > 0 else 0.0,
            memory_bytes=memory_bytes,
            gpu_memory_bytes=sum(shown) if shown else None,
        )


def _processes(*, with_children: bool) -> Iterator[tuple[int, float, int]]:
    """Id, seconds of processor time and bytes of resident memory of this process, and of all its descendants."""
    this = psutil.Process()
    for process in (this, *(this.children(recursive=True) if with_children else ())):
        try:
            with process.oneshot():
                times = process.cpu_times()
                yield process.pid, times.user + times.system, process.memory_info().rss
        except psutil.Error:
            # it has ended since it was listed
            continue
