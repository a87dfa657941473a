"""The kinds of device: the CPU, CUDA, and a rehearsal of CUDA on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rl_core.devices.device import VISIBLE, Device, DeviceMemory, listed, node_address

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
    ranks_key: ClassVar[str] = "cluster.cpu_ranks_per_node"
    # Small enough to be filled while the one before is read, and again before caches forget it: twice as fast.
    bucket_bytes: ClassVar[int] = 8 * 2**20

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        tuning = KEEP_FREED_MEMORY if "OMP_WAIT_POLICY" in os.environ else {**KEEP_FREED_MEMORY, **SPIN}
        chosen = {name: os.environ.get(name, value) for name, value in tuning.items()}
        return {**threads, **chosen, VISIBLE: ""}


@dataclass(frozen=True)
class CudaDevice(Device):
    """A GPU of NVIDIA's."""

    name: ClassVar[str] = "cuda"
    extras: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    has_gpus: ClassVar[bool] = True
    ranks_key: ClassVar[str] = "cluster.gpus_per_node"
    # Each bucket costs an agreement of sender and receivers, so buckets are large.
    bucket_bytes: ClassVar[int] = 256 * 2**20
    collectives: ClassVar[Literal["gloo", "nccl"]] = "nccl"
    forks_workers: ClassVar[bool] = False
    kernels: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    process_group_backend: ClassVar[str] = "cpu:gloo,cuda:nccl"
    pins_host_memory: ClassVar[bool] = True

    def allocator_variables(self, *, shares_memory: bool) -> Mapping[str, str]:
        # Every microbatch has another number of tokens, which leaves gaps between segments of fixed size; but
        # containers without elevated privileges refuse `pidfd_getfd`, which sharing expandable ones needs
        # (https://github.com/pytorch/pytorch/issues/165685)
        return {} if shares_memory else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    @property
    def memory_id(self) -> str:
        import torch

        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    @property
    def chip(self) -> str:
        import torch

        return torch.cuda.get_device_name(self.torch_device)

    def activate(self) -> None:
        import torch

        torch.cuda.set_device(self.torch_device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def synchronize(self) -> None:
        import torch

        torch.cuda.current_stream(self.torch_device).synchronize()

    def release_memory(self) -> None:
        import torch

        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated(self.torch_device))

    def memory(self) -> DeviceMemory:
        import torch

        free, total = torch.cuda.mem_get_info(self.torch_device)
        own = torch.cuda.memory_reserved(self.torch_device)
        return DeviceMemory(total, free, own, self.peak_bytes())

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        import torch

        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def rng_state(self) -> dict[str, Any]:
        import torch

        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state(self.torch_device)}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        super().set_rng_state(state)
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.torch_device)


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
    ranks_key: ClassVar[str] = CudaDevice.ranks_key

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        # Every logical node has the same cores: one thread each, and Ray's visible devices are kept.
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
