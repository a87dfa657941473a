"""CUDA: every rank has a GPU, whose memory the models and replicas on it use in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rl_core.devices.device import Device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CudaDevice(Device):
    """A GPU of NVIDIA's."""

    name: ClassVar[str] = "cuda"
    extras: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    has_gpus: ClassVar[bool] = True
    ranks_key: ClassVar[str] = "cluster.gpus_per_node"
    # each bucket costs an agreement of sender and receivers, so buckets are large
    bucket_bytes: ClassVar[int] = 256 * 2**20
    collectives: ClassVar[Literal["gloo", "nccl"]] = "nccl"
    is_logical: ClassVar[bool] = False
    forks_workers: ClassVar[bool] = False
    kernels: ClassVar[Literal["cpu", "cuda"]] = "cuda"

    def worker_variables(self, num_threads: int) -> Mapping[str, str]:
        return {}

    def allocator_variables(self, *, shares_memory: bool) -> Mapping[str, str]:
        # every microbatch has another number of tokens, which leaves gaps between segments of fixed size; but
        # containers without elevated privileges refuse `pidfd_getfd`, by which expandable ones are shared
        # (https://github.com/pytorch/pytorch/issues/165685)
        return {} if shares_memory else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    @property
    def process_group_backend(self) -> str:
        return "cpu:gloo,cuda:nccl"

    @property
    def memory_id(self) -> str:
        import torch

        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    @property
    def pins_host_memory(self) -> bool:
        return True

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

    @property
    def capacity_bytes(self) -> int:
        import torch

        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def rng_state(self) -> dict[str, Any]:
        import torch

        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.torch_device)}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.torch_device)
