"""The process groups of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rl_core.devices import Device
from rl_core.mesh import Coordinates
from rl_core.model import Rendezvous
from rl_core.torch.process_group import join_process_group
from rl_megatron.config import MegatronConfig
from rl_megatron.parallel.random import seed_all
from rl_megatron.parallel.userbuffers import close_buffers


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among the ranks of its model. Megatron keeps the groups themselves, one set per process.

    Args:
        kind: The device that it computes on.
        control: All ranks, on gloo: scalars that decide what every rank does next.
        data: The ranks that hold the same part of the model and other rows, on gloo.
        layout: Sizes that say which part of the model each rank holds, all ranks among them.
    """

    rank: int
    world_size: int
    kind: Device
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    layout: Mapping[str, int]

    @classmethod
    def join(cls, rendezvous: Rendezvous, backend: MegatronConfig) -> Mesh:
        """Meet the other ranks; collective. If that fails, this process is in no group afterwards.

        Raises:
            ValueError: If the world is not a multiple of the ranks that one model needs.
        """
        join_process_group(rendezvous)
        timeout = timedelta(seconds=rendezvous.timeout_s)
        try:
            parallel_state.initialize_model_parallel(
                backend.tensor_model_parallel_size,
                backend.pipeline_model_parallel_size,
                backend.virtual_pipeline_model_parallel_size,
                context_parallel_size=backend.context_parallel_size,
                expert_model_parallel_size=backend.expert_model_parallel_size,
                expert_tensor_parallel_size=backend.expert_tensor_parallel_size,
                distributed_timeout_minutes=max(1, int(rendezvous.timeout_s // 60)),
                create_gloo_process_groups=True,
            )
            control = dist.new_group(backend="gloo", timeout=timeout)
        except BaseException:
            leave_groups()
            raise
        data = parallel_state.get_data_parallel_group_gloo()
        return cls(rendezvous.rank, rendezvous.world_size, rendezvous.kind, control, data, _layout(rendezvous, backend))

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on, as torch names it."""
        return self.kind.torch_device

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place; `ep` folds into the others."""
        index = {
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
        }
        return Coordinates(index, _sizes())

    def seed(self, seed: int) -> None:
        """Seed all generators: ranks that hold parts of one model on one shard's rows agree if they must."""
        seed_all(seed)

    def rng_state(self) -> dict[str, Any]:
        """State of torch's generators, and of those that Megatron keeps for regions of the model."""
        return {**self.kind.rng_state(), "regions": get_cuda_rng_tracker().get_states()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `rng_state` returned."""
        self.kind.set_rng_state(state)
        get_cuda_rng_tracker().set_states(state["regions"])

    def leave(self) -> None:
        """Leave the groups."""
        leave_groups()


def _sizes() -> dict[str, int]:
    """Ranks along each axis, in the groups of this process."""
    return {
        "dp": parallel_state.get_data_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def _layout(rendezvous: Rendezvous, backend: MegatronConfig) -> Mapping[str, int]:
    """All ranks, those along each axis and those that share an expert's matrices, and how pipeline ranks share layers;
    0 layers are an equal share."""
    stages = backend.megatron_kwargs.get("pipeline_model_parallel_layout")
    return {
        "world": rendezvous.world_size,
        **_sizes(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "vpp": backend.virtual_pipeline_model_parallel_size or 1,
        "first_layers": backend.num_layers_in_first_pipeline_stage or 0,
        "last_layers": backend.num_layers_in_last_pipeline_stage or 0,
        **({} if stages is None else {"stages": crc32(str(stages).encode())}),
    }


def leave_groups() -> None:
    """Leave all groups, Megatron's and torch's, and free the buffers that were made with them."""
    close_buffers()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
