"""Memory of a rank's parameters, gradients and optimizer state, counted without Megatron."""

from __future__ import annotations

from rl_core.model_config import ModelConfig
from rl_core.model_size import MOMENTS, WIDE_BYTES, ModelSize, RankMemory
from rl_core.weights import ITEM_BYTES
from rl_megatron.config import MegatronConfig


def rank_memory(
    backend: MegatronConfig,
    *,
    dense: float,
    experts: float,
    dense_ranks: int,
    expert_ranks: int,
    itemsize: int,
    trains_all: bool,
) -> RankMemory:
    """Return the memory of a rank.

    Only the optimizer's state is spread over data-parallel ranks. Every rank keeps whole weights and gradients of its
    part of the model.

    Args:
        backend: Settings of this backend, which choose the dtype of gradients.
        dense: Parameters of the rank outside of experts.
        experts: Parameters of its experts.
        dense_ranks: Ranks over which the optimizer's state of the former is spread.
        expert_ranks: Ranks over which the state of the latter is spread.
        itemsize: Bytes of each parameter in the dtype that the model computes in.
        trains_all: True if all weights train, rather than adapters or none.
    """
    weights = (dense + experts) * itemsize
    if not trains_all:
        return RankMemory(weights, weights, 0)
    is_wide = backend.distributed_data_parallel_config.grad_reduce_in_fp32
    grads = (dense + experts) * (WIDE_BYTES if is_wide else itemsize)
    # parameters in float32 are themselves what the optimizer steps
    each = WIDE_BYTES * (MOMENTS + (itemsize < WIDE_BYTES))
    state = each * (dense / dense_ranks + experts / expert_ranks)
    return RankMemory(weights + grads + state, weights + state, weights)


def memory_of(model: ModelConfig, backend: MegatronConfig, size: ModelSize, ranks: int, *, trains: bool) -> RankMemory:
    """Return the memory of the rank with the most parameters; see `rl_core.plugins.BackendPlugin.memory`."""
    tensor, stages = backend.tensor_model_parallel_size, backend.pipeline_model_parallel_size
    split = backend.expert_model_parallel_size * (backend.expert_tensor_parallel_size or tensor)
    return rank_memory(
        backend,
        dense=size.dense_of_stage(stages) / tensor,
        experts=size.experts / (stages * split),
        dense_ranks=max(1, ranks // (stages * tensor)),
        expert_ranks=max(1, ranks // (stages * split)),
        itemsize=ITEM_BYTES[model.precision],
        trains_all=trains and not model.lora_cfg.enabled,
    )
