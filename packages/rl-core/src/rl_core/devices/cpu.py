"""The CPU: ranks are processes that share a node's cores and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rl_core.devices.device import VISIBLE, Device

if TYPE_CHECKING:
    import torch

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Makes glibc keep the memory that torch frees. By default it gives a large tensor's pages back at once and faults them
in anew for the next one, which takes a fifth of a training step of large microbatches."""

SPIN = {"GOMP_SPINCOUNT": "20000"}
"""How often a thread of GCC's OpenMP, which torch computes with, looks for the others before it sleeps: for about a
millisecond, enough for the pauses between operations. By default it looks for more than ten: on cores that other
processes use as well, a training step then takes several times the processor's time, and as much longer."""


@dataclass(frozen=True)
class CpuDevice(Device):
    """The cores and the memory of a node."""

    name: ClassVar[str] = "cpu"
    extras: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    has_gpus: ClassVar[bool] = False
    ranks_key: ClassVar[str] = "cluster.cpu_ranks_per_node"
    # small enough to be filled while the one before is read, and again before caches forget it: twice as fast
    bucket_bytes: ClassVar[int] = 8 * 2**20
    collectives: ClassVar[Literal["gloo", "nccl"]] = "gloo"
    is_logical: ClassVar[bool] = False
    forks_workers: ClassVar[bool] = True
    kernels: ClassVar[Literal["cpu", "cuda"]] = "cpu"

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        tuning = KEEP_FREED_MEMORY if "OMP_WAIT_POLICY" in os.environ else {**KEEP_FREED_MEMORY, **SPIN}
        chosen = {name: os.environ.get(name, value) for name, value in tuning.items()}
        return {**threads, **chosen, VISIBLE: ""}

    @property
    def process_group_backend(self) -> str:
        return "gloo"

    @property
    def memory_id(self) -> str:
        return ""

    @property
    def pins_host_memory(self) -> bool:
        return False

    @property
    def chip(self) -> str:
        return ""

    def activate(self) -> None:
        """Do nothing: torch computes on the CPU by default."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return False

    def synchronize(self) -> None:
        """Do nothing: operations are done when their calls return."""

    def release_memory(self) -> None:
        """Do nothing: memory of the host is not handed over."""

    def memory_bytes(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def rng_state(self) -> dict[str, Any]:
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["cpu"])
