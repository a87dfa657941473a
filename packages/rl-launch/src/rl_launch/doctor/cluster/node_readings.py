"""Facts of a node, read on the node itself with the standard library and ray."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_launch.cluster.node_task import NodeFacts, facts_of_this_node
from rl_launch.doctor.cluster.gpu_readings import GpuReadings, read_gpus
from rl_launch.doctor.cluster.network_links import ethernet_rate, inactive_infiniband, infiniband_rates
from rl_launch.worker_envs.node_build import default_root

_LOCK_ANY_MEMORY = 14
"""Bit of CAP_IPC_LOCK, with which a process is not subject to the limit of locked memory."""


@dataclass(frozen=True)
class Room:
    """Space of a file system.

    Args:
        folder: Folder on it.
        total_bytes, free_bytes: Size, and free space for this user.
        is_writable: True if this user may write there.
    """

    folder: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


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
    """Facts of the node that this process runs on, a worker of Ray.

    Args:
        address: Address of the node, as others reach it.
        runs: Folder of runs.
    """
    # NVML's module comes with Ray
    import ray
    from ray._private.thirdparty import pynvml

    session = ray._private.worker._global_node.get_session_dir_path()
    rooms = {
        "runs": runs,
        "temporary files": tempfile.gettempdir(),
        "Ray": session,
        "RL_HOME": str(default_root().parent),
    }
    facts = facts_of_this_node(address)
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
        infiniband_bytes_per_s=infiniband_rates(),
        inactive_infiniband=inactive_infiniband(),
    )


def room(folder: Path) -> Room:
    """Return the space of a folder, or of the one that it would be made in."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    system = os.statvfs(there)
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Room(str(folder), system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize, is_writable)


def limits() -> dict[str, int | None]:
    """Return the maximum values of this process's limits: `nofile`, `nproc`, and `memlock` in bytes."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    hard = {name: resource.getrlimit(kind)[1] for name, kind in kinds.items()}
    found = {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in hard.items()}
    if _may_lock_any_memory():
        found["memlock"] = None
    return found


def _may_lock_any_memory() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff")), "0")
    return bool(int(effective, 16) >> _LOCK_ANY_MEMORY & 1)
