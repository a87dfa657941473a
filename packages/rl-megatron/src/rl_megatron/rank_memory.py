"""Memory of a rank's parameters, gradients and optimizer state, counted without Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rl_core.devices import Device
from rl_core.facts.model_size import WIDE_BYTES, ModelSize, RankMemory
from rl_core.facts.optimizer_arguments import state_bytes
from rl_core.facts.rank_layout import RankLayout
from rl_core.model_config import ModelConfig
from rl_core.weights import ITEM_BYTES
from rl_megatron.config import MegatronConfig
from rl_megatron.transformer_fields import RECOMPUTED_WITH_TE


class RankPart(NamedTuple):
    """A part of a model on one rank.

    Args:
        held: Number of its parameters.
        trained: Number of those that train.
        ranks: Number of ranks that share the optimizer's state for them.
        is_matrix: True if they are in matrices of hidden layers.
    """

    held: float
    trained: float
    ranks: int
    is_matrix: bool


def rank_memory(model: ModelConfig, backend: MegatronConfig, parts: Iterable[RankPart], itemsize: int) -> RankMemory:
    """Return the memory of a rank.

    Only the optimizer's state is spread over data-parallel ranks. Every rank keeps whole weights and gradients of
    its part of the model.

    Args:
        model: Config section of the model, which chooses the optimizer.
        backend: Settings of this backend, which choose the dtype of gradients.
        parts: The parts of the model that the rank holds.
        itemsize: Bytes of each parameter in the dtype that the model computes in.
    """
    parts = list(parts)
    weights, trained = sum(part.held for part in parts) * itemsize, sum(part.trained for part in parts)
    is_wide = backend.distributed_data_parallel_config.grad_reduce_in_fp32
    each = state_bytes(model.optimizer.name, model.optimizer.kwargs)
    # The optimizer steps parameters in float32 themselves, and a copy of others.
    copies = WIDE_BYTES * (itemsize < WIDE_BYTES)
    state = sum(
        part.trained / part.ranks * (copies + (each.matrices if part.is_matrix else each.others)) for part in parts
    )
    grads = trained * (WIDE_BYTES if is_wide else itemsize)
    return RankMemory(weights + state + grads, weights + state, trained * itemsize, optimizer=state)


def memory_of(
    model: ModelConfig, backend: MegatronConfig, size: ModelSize, ranks: int, *, trained: ModelSize
) -> RankMemory:
    """Return the memory of the rank with the most parameters; see `rl_core.plugins.BackendPlugin.memory`."""
    tensor, stages = backend.tensor_model_parallel_size, backend.pipeline_model_parallel_size
    split = backend.expert_model_parallel_size * (backend.expert_tensor_parallel_size or tensor)
    copies, expert_copies = max(1, ranks // (stages * tensor)), max(1, ranks // (stages * split))
    (layers, ends, experts), (trained_layers, trained_ends, trained_experts) = (
        (each.layers / (stages * tensor), each.ends_of_rank(stages, tensor), each.experts / (stages * split))
        for each in (size, trained)
    )
    parts = [
        RankPart(layers, trained_layers, copies, is_matrix=True),
        RankPart(ends, trained_ends, copies, is_matrix=False),
        RankPart(experts, trained_experts, expert_copies, is_matrix=True),
    ]
    return rank_memory(model, backend, parts, ITEM_BYTES[model.precision])


def layout_of(model: ModelConfig, backend: MegatronConfig, ranks: int, device: Device) -> RankLayout:
    """Return how ranks share a model; see `rl_core.plugins.BackendPlugin.layout`."""
    tensor, stages, context = (
        backend.tensor_model_parallel_size,
        backend.pipeline_model_parallel_size,
        backend.context_parallel_size,
    )
    recompute, is_fused = backend.recompute, device.runs_on_gpus and backend.transformer_engine is not False
    return RankLayout(
        tensor=tensor,
        context=context,
        pipeline=stages,
        chunks=backend.virtual_pipeline_model_parallel_size or 1,
        data=max(1, ranks // (tensor * stages * context)),
        experts=backend.expert_model_parallel_size,
        splits_tokens=backend.sequence_parallel,
        joins_projections=True,
        is_fused=is_fused,
        recompute="none" if recompute == "auto" and not device.runs_on_gpus else recompute,
        expert_tensor=backend.expert_tensor_parallel_size,
        recomputed=tuple(backend.recompute_modules or (sorted(RECOMPUTED_WITH_TE) if is_fused else ("mlp", "moe"))),
    )
