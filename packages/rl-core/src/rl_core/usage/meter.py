"""Use of cores, memory and GPUs by a process and its machine, read when the driver that monitors a run asks for it."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

_log = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True)
class GpuUsage:
    """Use of one GPU by all its processes. A value that the GPU does not report is None.

    Args:
        index: Index of the GPU on its machine, in the order of the PCI bus.
        uuid: Its UUID.
        utilization: Share of the driver's last sample period (up to 1 s) with a kernel running, 0 to 1.
        memory_bytes: Memory in use.
        memory_total_bytes: Memory of the GPU.
        power_w: Power in watts.
        temperature_c: Temperature in degrees Celsius.
    """

    index: int
    uuid: str
    utilization: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """All GPUs of this machine, whichever of them a process may use. There are none without nvidia-ml-py or a driver.

    Args:
        nvml: Module `pynvml` of nvidia-ml-py, initialised; None reads nothing.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml: Any = nvml
        count = 0 if nvml is None else nvml.nvmlDeviceGetCount()
        self._handles: list[Any] = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    @classmethod
    def of_this_machine(cls) -> Gpus:
        """Return the GPUs of this machine."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls(None)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.debug("GPUs are not monitored: %s", error)
            return cls(None)
        return cls(nvml)

    def read(self) -> tuple[GpuUsage, ...]:
        """Return the use of each GPU."""
        return tuple(self._usage(index, handle) for index, handle in enumerate(self._handles))

    def memory_by_pid(self) -> Mapping[int, int] | None:
        """Return the bytes of GPU memory by process, over all GPUs; None if there are no GPUs. The driver leaves out
        processes that it cannot show, such as in a container without the machine's process ids.
        """
        if not self._handles:
            return None
        found: dict[int, int] = {}
        for handle in self._handles:
            for process in self._reported(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
                if process.usedGpuMemory is not None:
                    found[process.pid] = found.get(process.pid, 0) + process.usedGpuMemory
        return found

    def _usage(self, index: int, handle: Any) -> GpuUsage:
        nvml = self._nvml
        rates = self._reported(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._reported(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._reported(nvml.nvmlDeviceGetPowerUsage, handle)
        degrees = self._reported(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return GpuUsage(
            index=index,
            uuid=self._reported(nvml.nvmlDeviceGetUUID, handle) or "",
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if degrees is None else float(degrees),
        )

    def _reported(self, query: Callable[..., Value], *args: Any) -> Value | None:
        """Answer of the driver; None if it refuses, as for values that a GPU does not have."""
        try:
            return query(*args)
        except self._nvml.NVMLError:
            return None


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
        """Return the share of the time of all cores that was used since the last call, 0 to 1."""
        busy_s, total_s = _core_seconds()
        passed_s, used_s = total_s - self._total_s, busy_s - self._busy_s
        self._total_s, self._busy_s = total_s, busy_s
        return min(max(used_s / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0


def _core_seconds() -> tuple[float, float]:
    """Seconds that the cores were busy, and all their seconds, since the machine was started."""
    times = psutil.cpu_times()
    # The kernel counts the time of guests as time of users, too.
    total_s = sum(times) - times.guest - times.guest_nice
    return total_s - times.idle - times.iowait, total_s


def read_memory() -> tuple[int, int]:
    """Return the bytes of memory in use, and of the machine."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available, memory.total


def read_shared_memory() -> int | None:
    """Return the bytes of the files in shared memory; None if the machine has none."""
    try:
        return int(psutil.disk_usage(SHARED_MEMORY).used)
    except OSError:
        return None


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
    """Yield id, seconds of processor time and bytes of resident memory of this process, and of all its descendants."""
    this = psutil.Process()
    for process in (this, *(this.children(recursive=True) if with_children else ())):
        try:
            with process.oneshot():
                times = process.cpu_times()
                yield process.pid, times.user + times.system, process.memory_info().rss
        except psutil.Error:
            # It has ended since it was listed.
            continue


@dataclass(frozen=True)
class Usage:
    """One reading.

    Args:
        process: Use by the process.
        machine: Use of its machine; None if it was not asked for.
    """

    process: ProcessUsage
    machine: MachineUsage | None = None


class Meter:
    """Reads the use of resources when it is asked. Nothing runs between two readings.

    A reading takes a few milliseconds: the process table is read once, and NVML is asked once per GPU.

    Args:
        with_children: Count the descendants of the process, too.
    """

    def __init__(self, *, with_children: bool = True) -> None:
        self._process = ProcessMeter(with_children=with_children)
        self._cores = CoreMeter()
        self._gpus: Gpus | None = None

    def read(self, *, with_machine: bool) -> Usage:
        """Use of resources since the reading before.

        Args:
            with_machine: Read the machine and its GPUs, too: one process of each machine does.
        """
        if self._gpus is None:
            self._gpus = Gpus.of_this_machine()
        process = self._process.read(self._gpus.memory_by_pid())
        if not with_machine:
            return Usage(process)
        share, memory = self._cores.read(), read_memory()
        return Usage(process, MachineUsage(share, *memory, read_shared_memory(), self._gpus.read()))
