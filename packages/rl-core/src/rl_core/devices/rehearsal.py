"""CUDA's topology without a GPU: a run goes through the same steps as on a cluster of GPUs, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_core.devices.cpu import KEEP_FREED_MEMORY, CpuDevice
from rl_core.devices.cuda import CudaDevice
from rl_core.devices.device import VISIBLE, listed, node_address

if TYPE_CHECKING:
    import torch

LOGICAL = "RL_LOGICAL_GPUS"
"""Environment variable of a rehearsing worker: its logical GPUs, as `CUDA_VISIBLE_DEVICES` would list them."""

FROM_RAY = "ray"
"""Its value until the worker's process has read the `CUDA_VISIBLE_DEVICES` that Ray set."""


def hide_real_gpus() -> None:
    """In a rehearsing worker, take the logical GPUs that Ray gave it out of `CUDA_VISIBLE_DEVICES`, so that torch sees
    none of the machine's real ones. Called before torch is imported; does nothing elsewhere.
    """
    if os.environ.get(LOGICAL) == FROM_RAY:
        os.environ[LOGICAL] = os.environ.get(VISIBLE, "")
        os.environ[VISIBLE] = ""


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
    forks_workers: ClassVar[bool] = True
    ranks_key: ClassVar[str] = CudaDevice.ranks_key

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        # every logical node has the same cores: one thread each, and Ray's visible devices are kept
        return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **KEEP_FREED_MEMORY, LOGICAL: FROM_RAY}

    def claim(self, gpus: Sequence[str]) -> None:
        if gpus:
            os.environ[LOGICAL] = ",".join(gpus)

    def visible(self) -> tuple[str, ...]:
        return listed(os.environ.get(LOGICAL) or os.environ.get(VISIBLE, ""))

    @property
    def memory_id(self) -> str:
        return f"{node_address()}/{self.visible()[self.index]}"

    def holds(self, tensor: torch.Tensor) -> bool:
        return True
