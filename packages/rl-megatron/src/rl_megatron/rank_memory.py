"""Memory of a rank's parameters, gradients and optimizer state, counted without Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.model_config import ModelConfig
from rl_core.model_size import MOMENTS, WIDE_BYTES, ModelSize, RankMemory
from rl_core.weights import ITEM_BYTES
from rl_megatron.config import MegatronConfig


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of a rank.

    Args:
        dense: In its layers outside of experts, and at the ends of the model.
        experts: In its experts.
        dense_ranks: Ranks over which the optimizer's state of the former is spread.
        expert_ranks: Ranks over which the state of the latter is.
        itemsize: Bytes of each in the dtype that the model computes in.
        vocab: Tokens that its part of the head has; 0 if they are not counted.
    """

    dense: float
    experts: float
    dense_ranks: int
    expert_ranks: int
    itemsize: int
    vocab: int = 0

    def memory(self, backend: MegatronConfig, *, trains_all: bool) -> RankMemory:
        """Return the memory of the rank.

        Only the optimizer's state is spread over data-parallel ranks. Every rank keeps whole weights and gradients of
        its part of the model.

        Args:
            backend: Settings of this backend, which choose the dtype of gradients.
            trains_all: True if all weights train, rather than adapters or none.
        """
        count = self.dense + self.experts
        weights = count * self.itemsize
        if not trains_all:
            return RankMemory(weights, weights, 0)
        is_wide = backend.distributed_data_parallel_config.grad_reduce_in_fp32
        # parameters in float32 are themselves what the optimizer steps
        each = WIDE_BYTES * (MOMENTS + (self.itemsize < WIDE_BYTES))
        kept = weights + each * (self.dense / self.dense_ranks + self.experts / self.expert_ranks)
        return RankMemory(kept + count * (WIDE_BYTES if is_wide else self.itemsize), kept, weights)


def memory_of(model: ModelConfig, backend: MegatronConfig, size: ModelSize, ranks: int, *, trains: bool) -> RankMemory:
    """Return the memory of the rank with the most parameters; see `rl_core.plugins.BackendPlugin.memory`."""
    tensor, stages = backend.tensor_model_parallel_size, backend.pipeline_model_parallel_size
    split = backend.expert_model_parallel_size * (backend.expert_tensor_parallel_size or tensor)
    parameters = RankParameters(
        size.dense_of_stage(stages) / tensor,
        size.experts / (stages * split),
        max(1, ranks // (stages * tensor)),
        max(1, ranks // (stages * split)),
        ITEM_BYTES[model.precision],
    )
    return parameters.memory(backend, trains_all=trains and not model.lora_cfg.enabled)
