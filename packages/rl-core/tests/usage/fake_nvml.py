"""Stands in for `pynvml`, the module of nvidia-ml-py: its functions, structures and errors, over GPUs of a test."""

# ruff: noqa: N802  # names of NVML

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_LIBRARY_NOT_FOUND = 12


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass
class FakeGpu:
    """One GPU. A value of None is not supported by it."""

    uuid: str = "GPU-0"
    utilization: int | None = 0
    used: int = 0
    total: int = 80 * 2**30
    milliwatts: int | None = 0
    degrees: int = 30
    processes: Sequence[tuple[int, int | None]] = field(default_factory=list)


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_GPU

    def __init__(self, gpus: Sequence[FakeGpu], *, has_driver: bool = True) -> None:
        self._gpus = list(gpus)
        self._has_driver = has_driver

    def nvmlInit(self) -> None:
        if not self._has_driver:
            raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._gpus[index]

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(gpu=_supported(handle.utilization), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(used=handle.used, free=handle.total - handle.used, total=handle.total)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return _supported(handle.milliwatts)

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == NVML_TEMPERATURE_GPU
        return handle.degrees

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes]


def _supported(value: int | None) -> int:
    if value is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return value
