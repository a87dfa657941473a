"""GPUs of a node and their faults, read through NVML on the node itself.

It needs only the standard library: a node that has ray, whose own copy of NVML's module is used, and nothing of this
project runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_NVLINK_SPEED_FIELD = 90
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: speed of each active NVLink in MB/s."""

_MOST_NVLINKS = 18


@dataclass(frozen=True)
class Fault:
    """A fault of a GPU.

    Args:
        text: The fault, with the index of the GPU.
        is_fatal: True if a run cannot use the GPU.
    """

    text: str
    is_fatal: bool


@dataclass(frozen=True)
class GpuReading:
    """A GPU.

    Args:
        index: Index of the GPU on its node, in the order of the PCI bus.
        name: Name of the product.
        memory_bytes, used_bytes: Memory of the GPU, and memory in use; None if it does not report them.
        num_nvlinks: Number of active NVLinks.
        nvlink_bytes_per_s: Speed of all active NVLinks together, in each direction; None if unknown.
    """

    index: int
    name: str
    memory_bytes: int | None
    used_bytes: int | None
    num_nvlinks: int = 0
    nvlink_bytes_per_s: float | None = None


@dataclass(frozen=True)
class GpuReadings:
    """The GPUs of a node.

    Args:
        driver: Version of NVIDIA's driver; empty if there is none.
        cuda: Newest CUDA version that the driver runs, such as `13.0`.
        gpus: GPUs that answer.
        faults: Faults of all GPUs.
        problem: Why NVML cannot be used; empty if it can.
    """

    driver: str = ""
    cuda: str = ""
    gpus: tuple[GpuReading, ...] = ()
    faults: tuple[Fault, ...] = ()
    problem: str = ""


def read_gpus(nvml: Any) -> GpuReadings:
    """Read all GPUs.

    Args:
        nvml: Module `pynvml`.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReadings(problem=f"NVML does not start: {error}")
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus, faults = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_reading(nvml, index, handle))
            except nvml.NVMLError as error:
                faults.append(Fault(f"GPU {index} does not answer: {error}", is_fatal=True))
            else:
                faults += _faults(nvml, index, handle)
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        return GpuReadings(nvml.nvmlSystemGetDriverVersion(), cuda, tuple(gpus), tuple(faults))
    except nvml.NVMLError as error:
        return GpuReadings(problem=f"NVML fails: {error}")
    finally:
        nvml.nvmlShutdown()


def _reading(nvml: Any, index: int, handle: Any) -> GpuReading:
    name = nvml.nvmlDeviceGetName(handle)
    memory = _reported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    states = [_reported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MOST_NVLINKS)]
    num_active = sum(bool(state) for state in states)
    speed = _nvlink_speed(nvml, handle) if num_active else None
    return GpuReading(
        index=index,
        name=name,
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        num_nvlinks=num_active,
        nvlink_bytes_per_s=None if speed is None else num_active * speed,
    )


def _nvlink_speed(nvml: Any, handle: Any) -> float | None:
    """Speed of one NVLink in bytes/s."""
    values = _reported(nvml, nvml.nvmlDeviceGetFieldValues, handle, [_NVLINK_SPEED_FIELD])
    if not values or values[0].nvmlReturn or not values[0].value.uiVal:
        return None
    return float(values[0].value.uiVal * 1e6)


def _faults(nvml: Any, index: int, handle: Any) -> Iterator[Fault]:
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _reported(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile)
    if errors:
        yield Fault(f"GPU {index} has had {errors} uncorrectable memory errors since its last reset", is_fatal=False)
    rows = _reported(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        _, _, is_pending, has_failed = rows
        if has_failed:
            yield Fault(f"GPU {index} has failed to replace a broken row of its memory", is_fatal=True)
        if is_pending:
            yield Fault(f"GPU {index} replaces a broken row of its memory at its next reset", is_fatal=False)
    if _reported(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        yield Fault(f"GPU {index} retires a page of its memory at the next reboot", is_fatal=False)
    reasons = _reported(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    causes = {
        "heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "its power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    if found := [cause for cause, bit in causes.items() if reasons & bit]:
        yield Fault(f"GPU {index} is slowed down by {' and '.join(found)}", is_fatal=False)


def _reported(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None if the GPU does not report the value."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None
