"""Activations that the backward pass computes again instead of finding them kept."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Granularity = Literal["full", "selective"]

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


def checkpoint_activations(hf: PreTrainedModel, granularity: Granularity) -> None:
    """Make each layer of a model keep only its input and, if selective, the results of matrix products and
    attention."""
    options: dict[str, Any] = {"use_reentrant": False}
    if granularity == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    hf.gradient_checkpointing_enable(options)


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operation in KEPT or operation.namespace in KEPT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
