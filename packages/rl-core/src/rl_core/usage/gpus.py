"""GPUs of this machine, read through NVML."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True)
class GpuUsage:
    """Use of one GPU by all its processes. A value that the GPU does not report is None.

    Args:
        index: Index of the GPU on its machine, in the order of the PCI bus.
        uuid: Its UUID.
        utilization: Share of the driver's last sample period (up to 1 s) in which a kernel ran, 0 to 1.
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

    def __init__(self, nvml: Any | None) -> None:
        self._nvml = nvml
        self._handles = [] if nvml is None else _handles(nvml)

    @classmethod
    def of_this_machine(cls) -> Gpus:
        """The GPUs of this machine."""
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
        """The use of each GPU."""
        return tuple(self._usage(index, handle) for index, handle in enumerate(self._handles))

    def memory_by_pid(self) -> Mapping[int, int] | None:
        """Bytes of GPU memory by process, over all GPUs; None if there are no GPUs. The driver leaves out processes
        that it cannot show, such as those of a container without the machine's process ids.
        """
        nvml: Any = self._nvml
        if not self._handles:
            return None
        found: dict[int, int] = {}
        for handle in self._handles:
            for process in self._reported(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
                if process.usedGpuMemory is not None:
                    found[process.pid] = found.get(process.pid, 0) + process.usedGpuMemory
        return found

    def _usage(self, index: int, handle: Any) -> GpuUsage:
        nvml: Any = self._nvml
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
        nvml: Any = self._nvml
        try:
            return query(*args)
        except nvml.NVMLError:
            return None


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
