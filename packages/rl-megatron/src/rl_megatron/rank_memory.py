"""Memory of a rank's parameters, gradients and optimizer state, counted without Megatron."""

from __future__ import annotations

from rl_core.facts.model_size import MOMENTS, WIDE_BYTES, ModelSize, RankMemory
from rl_core.model_config import ModelConfig
from rl_core.weights import ITEM_BYTES
from rl_megatron.config import MegatronConfig


def rank_memory(
    backend: MegatronConfig, dense: tuple[float, int], experts: tuple[float, int], itemsize: int, *, trains_all: bool
) -> RankMemory:
    """Return the memory of a rank.

    Only the optimizer's state is spread over data-parallel ranks. Every rank keeps whole weights and gradients of
    its part of the model.

    Args:
        backend: Settings of this backend, which choose the dtype of gradients.
        dense: Number of parameters in its layers outside of experts and at the ends of the model, and the number of
            ranks that share the optimizer's state for them.
        experts: The same for its experts.
        itemsize: Bytes of each parameter in the dtype that the model computes in.
        trains_all: True if all weights train, rather than adapters or none.
    """
    count = dense[0] + experts[0]
    weights = count * itemsize
    if not trains_all:
        return RankMemory(weights, weights, 0)
    is_wide = backend.distributed_data_parallel_config.grad_reduce_in_fp32
    # The optimizer steps parameters in float32 themselves, and a copy of others.
    each = WIDE_BYTES * (MOMENTS + (itemsize < WIDE_BYTES))
    kept = weights + each * (dense[0] / dense[1] + experts[0] / experts[1])
    return RankMemory(kept + count * (WIDE_BYTES if is_wide else itemsize), kept, weights)


def memory_of(model: ModelConfig, backend: MegatronConfig, size: ModelSize, ranks: int, *, trains: bool) -> RankMemory:
    """Return the memory of the rank with the most parameters; see `rl_core.plugins.BackendPlugin.memory`."""
    tensor, stages = backend.tensor_model_parallel_size, backend.pipeline_model_parallel_size
    split = backend.expert_model_parallel_size * (backend.expert_tensor_parallel_size or tensor)
    dense = (size.dense_of_stage(stages) / tensor, max(1, ranks // (stages * tensor)))
    experts = (size.experts / (stages * split), max(1, ranks // (stages * split)))
    trains_all = trains and not model.lora_cfg.enabled
    return rank_memory(backend, dense, experts, ITEM_BYTES[model.precision], trains_all=trains_all)
