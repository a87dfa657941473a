"""Use of a machine's cores and memory."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from rl_core.usage.gpus import GpuUsage

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class MachineUsage:
    """Use of a machine by all its processes. In a container these are the figures of the machine under it.

    Args:
        cpu_utilization: Share of the time of all cores that was used since the reading before, 0 to 1.
        memory_bytes: Memory that is not available to new processes without swapping.
        memory_total_bytes: Memory of the machine.
        shared_memory_bytes: Size of the files in `/dev/shm`, Ray's object store among them; None if there is none.
        gpus: Use of its GPUs.
    """

    cpu_utilization: float
    memory_bytes: int
    memory_total_bytes: int
    shared_memory_bytes: int | None
    gpus: tuple[GpuUsage, ...]


class CoreMeter:
    """Measures the share of the cores' time that is used between two readings; the first counts from its creation."""

    def __init__(self) -> None:
        self._busy_s, self._total_s = _core_seconds()

    def read(self) -> float:
        """Share of the time of all cores that was used since the last call, 0 to 1."""
        busy_s, total_s = _core_seconds()
        passed_s, used_s = total_s - self._total_s, busy_s - self._busy_s
        self._total_s, self._busy_s = total_s, busy_s
        return min(max(used_s / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0


def _core_seconds() -> tuple[float, float]:
    """Seconds that the cores were busy, and all their seconds, since the machine was started."""
    times = psutil.cpu_times()
    # the kernel counts the time of guests as time of users, too
    total_s = sum(times) - times.guest - times.guest_nice
    return total_s - times.idle - times.iowait, total_s


def read_memory() -> tuple[int, int]:
    """Bytes of memory in use, and of the machine."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available, memory.total


def read_shared_memory() -> int | None:
    """Bytes of the files in shared memory; None if the machine has none."""
    try:
        return int(psutil.disk_usage(SHARED_MEMORY).used)
    except OSError:
        return None
