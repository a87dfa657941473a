"""Facts of a node, read on the node itself: its limits, disks, GPUs through NVML, and network links.

It needs only the standard library and ray, whose own copy of NVML's module is used: a node that has ray and nothing of
this project runs it.
"""

from __future__ import annotations

import platform
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launch.cluster.node_task import NodeFacts, facts_of_this_node
from rl_launch.doctor.room import Room, room
from rl_launch.worker_envs.node_build import default_root

_LOCK_ANY_MEMORY = 14
"""Bit of CAP_IPC_LOCK, which frees a process from the limit of locked memory."""

_NVLINK_SPEED_FIELD = 90
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: speed of each active NVLink in MB/s."""

_MAX_NVLINKS = 18

SYS = Path("/sys")


@dataclass(frozen=True)
class GpuFault:
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
    faults: tuple[GpuFault, ...] = ()
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
                faults.append(GpuFault(f"GPU {index} does not answer: {error}", is_fatal=True))
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
    states = [_reported(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_MAX_NVLINKS)]
    num_active, speed = sum(bool(state) for state in states), None
    if num_active:
        values = _reported(nvml, nvml.nvmlDeviceGetFieldValues, handle, [_NVLINK_SPEED_FIELD])
        if values and not values[0].nvmlReturn and values[0].value.uiVal:
            speed = num_active * float(values[0].value.uiVal * 1e6)
    total, used = (None, None) if memory is None else (int(memory.total), int(memory.used))
    return GpuReading(index, name, total, used, num_active, speed)


def _faults(nvml: Any, index: int, handle: Any) -> Iterator[GpuFault]:
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _reported(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile)
    if errors:
        yield GpuFault(f"GPU {index} has had {errors} uncorrectable memory errors since its last reset", is_fatal=False)
    rows = _reported(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        _, _, is_pending, has_failed = rows
        if has_failed:
            yield GpuFault(f"GPU {index} has failed to replace a broken row of its memory", is_fatal=True)
        if is_pending:
            yield GpuFault(f"GPU {index} replaces a broken row of its memory at its next reset", is_fatal=False)
    if _reported(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        yield GpuFault(f"GPU {index} retires a page of its memory at the next reboot", is_fatal=False)
    reasons = _reported(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    causes = {
        "heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "its power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    if found := [cause for cause, bit in causes.items() if reasons & bit]:
        yield GpuFault(f"GPU {index} is slowed down by {' and '.join(found)}", is_fatal=False)


def _reported(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer; None if the GPU does not report the value."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


@dataclass(frozen=True)
class Readings:
    """Facts that a node reports about itself.

    Args:
        python, ray: Versions.
        kernel: Version of the operating system's kernel.
        facts: Cores and network interface.
        gpus: GPUs and their driver.
        rooms: Space by use: `runs`, `temporary files`, `Ray` and `RL_HOME`.
        shared_memory: Space of /dev/shm; None if there is none.
        limits: Maximum values that a process may set: `nofile`, `nproc`, and `memlock` in bytes; None is unlimited.
        ethernet_bytes_per_s: Rate of the interface of the node's address; None if unknown.
        infiniband_bytes_per_s: Rate of each active port of InfiniBand.
        inactive_infiniband: Ports that are connected and not active.
    """

    python: str
    ray: str
    kernel: str
    facts: NodeFacts
    gpus: GpuReadings
    rooms: Mapping[str, Room]
    shared_memory: Room | None
    limits: Mapping[str, int | None]
    ethernet_bytes_per_s: float | None
    infiniband_bytes_per_s: Mapping[str, float]
    inactive_infiniband: Sequence[str]


def readings_of_this_node(address: str, runs: str) -> Readings:
    """Read the facts of the node that this process runs on, a worker of Ray.

    Args:
        address: Address of the node, as others reach it.
        runs: Folder of runs.
    """
    # NVML's module comes with Ray.
    import ray
    from ray._private.thirdparty import pynvml

    rooms = {"runs": runs, "temporary files": tempfile.gettempdir()}
    rooms |= {"Ray": ray._private.worker._global_node.get_session_dir_path(), "RL_HOME": str(default_root().parent)}
    facts, (rates, inactive) = facts_of_this_node(address), infiniband_ports()
    return Readings(
        python=platform.python_version(),
        ray=ray.__version__,
        kernel=platform.release(),
        facts=facts,
        gpus=read_gpus(pynvml),
        rooms={use: room(Path(folder)) for use, folder in rooms.items()},
        shared_memory=room(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        limits=limits(),
        ethernet_bytes_per_s=ethernet_rate(facts.interface),
        infiniband_bytes_per_s=rates,
        inactive_infiniband=inactive,
    )


def limits() -> dict[str, int | None]:
    """Return the maximum values of this process's limits: `nofile`, `nproc`, and `memlock` in bytes."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    hard = {name: resource.getrlimit(kind)[1] for name, kind in kinds.items()}
    found = {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in hard.items()}
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = next((line.split()[1] for line in lines if line.startswith("CapEff")), "0")
        if int(effective, 16) >> _LOCK_ANY_MEMORY & 1:
            found["memlock"] = None
    return found


def ethernet_rate(interface: str, sys: Path = SYS) -> float | None:
    """Return the rate of a network interface in bytes/s; None if it is unknown, as for virtual ones.

    Args:
        interface: Name of the interface, such as `eth0`.
        sys: Root of the files.
    """
    try:
        megabits = int((sys / "class/net" / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if interface and megabits > 0 else None


def infiniband_ports(sys: Path = SYS) -> tuple[dict[str, float], list[str]]:
    """Read the ports of InfiniBand or RoCE.

    Args:
        sys: Root of the files.

    Returns:
        The rate of each active port in bytes/s, by device and port such as `mlx5_0/1`, and the ports that have a cable
        and are not active, such as `mlx5_1/1 (INIT)`.
    """
    rates, inactive = {}, []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError, IndexError):
            name, state = f"{port.parent.parent.name}/{port.name}", (port / "state").read_text()
            if "ACTIVE" in state:
                rates[name] = float((port / "rate").read_text().split()[0]) * 1e9 / 8
            elif "LinkUp" in (port / "phys_state").read_text():
                inactive.append(f"{name} ({state.partition(':')[2].strip()})")
    return rates, inactive
