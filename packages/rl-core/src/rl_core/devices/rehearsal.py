"""CUDA's topology without a GPU: what a run does on a cluster of GPUs, computed by the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_core.devices.cpu import KEEP_FREED_MEMORY, CpuDevice
from rl_core.devices.cuda import CudaDevice
from rl_core.devices.device import ClusterSizes, node_address

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RehearsalDevice(CpuDevice):
    """A logical GPU of Ray's, with the CPU's tensors and gloo.

    Placement, pinning, visible devices, residency, transports, offload and restarts are CUDA's. A tensor that is
    offloaded really leaves its storage, so that using it before it is back fails as it does on a GPU. Only the kernels
    are the CPU's.
    """

    name: ClassVar[str] = "rehearsal"
    has_gpus: ClassVar[bool] = True
    is_logical: ClassVar[bool] = True
    ranks_key: ClassVar[str] = CudaDevice.ranks_key

    def ranks_per_node(self, cluster: ClusterSizes) -> int:
        return cluster.gpus_per_node

    def bundle(self, num_ranks: int) -> dict[str, float]:
        return {"GPU": num_ranks, "CPU": num_ranks}

    def num_gpus(self, num_ranks: int) -> int:
        return num_ranks

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        # every logical node has the same cores: one thread each, and Ray's visible devices are kept
        return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **KEEP_FREED_MEMORY}

    @property
    def memory_id(self) -> str:
        return f"{node_address()}/{self.visible()[self.index]}"

    def holds(self, tensor: torch.Tensor) -> bool:
        return True
