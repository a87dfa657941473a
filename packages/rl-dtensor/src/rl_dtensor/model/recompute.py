"""Activations that the backward pass computes again instead of finding them kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.torch.training.recompute import RecomputePlan
from rl_dtensor.parallel.kept_sizes import keeping_sizes

_aten = torch.ops.aten
KEPT = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    )
)
"""Operations that cost most for what their results take; scores (`bmm`) are not among them."""

KEPT_NAMESPACES = ("torch_attn", "flash_attn", "flash_attn_3")
"""Namespaces of variable-length attention, in torch and in packages."""


def checkpoint_activations(hf: PreTrainedModel, layers: Sequence[nn.Module], plan: RecomputePlan) -> None:
    """Make layers of a model keep less for the backward pass, and compute the rest again.

    Models whose layers cannot be told apart recompute all as the plan does most of them.

    Args:
        hf: The model, or a stage of it.
        layers: Its repeated layers, in order.
        plan: How many of them recompute what.
    """
    plan = plan.clamped(len(layers))
    if plan == RecomputePlan():
        return
    full = partial(checkpoint, use_reentrant=False, context_fn=keeping_sizes)
    selecting = partial(create_selective_checkpoint_contexts, _policy)
    selective = partial(full, context_fn=partial(keeping_sizes, selecting))
    hf.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keeping_sizes})
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        if not plan.num_full:
            hf._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=selective)
        return
    for place, layer in enumerate(layers):
        own: Any = layer
        own.gradient_checkpointing = place < plan.num_full + plan.num_selective
        own._gradient_checkpointing_func = full if place < plan.num_full else selective


def is_kept(operation: Any) -> bool:
    """Return whether selective recomputation keeps the results of an operation."""
    return operation in KEPT or operation.namespace in KEPT_NAMESPACES


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE
