"""Attention of decoding passes, without copies of the keys and values that several heads share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend_in_groups() -> None:
    """Make the `sdpa` attention of `transformers` in this process compute passes over one token by groups of heads."""
    AttentionInterface.register("sdpa", grouped_attention)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as the `sdpa` function of `transformers` computes it, which with a mask copies keys and values once for
    every head that shares them.

    The heads that share keys are passed as places of one head, if there is one query, so that nothing is copied. All
    other calls go to the function of `transformers`.

    Args:
        module: Attention layer that calls the function.
        query: `[rows, heads, queries, head_dim]`.
        key: `[rows, shared heads, columns, head_dim]`.
        value: Same layout as `key`.
        attention_mask: Boolean or added to the scores, `[rows, 1, queries, columns]`; None for none.
        dropout: Share of the attention weights that is dropped.
        scaling: Scaling of the products; `head_dim ** -0.5` if None.
        **others: Other arguments that the model passes.

    Returns:
        `[rows, queries, heads, head_dim]`.
    """
    rows, heads, queries, head_dim = query.shape
    shared = key.shape[1]
    is_plain = others.get("position_bias") is None and others.get("cache") is None
    has_mask_of_heads = attention_mask is not None and (attention_mask.dim() != 4 or attention_mask.shape[1] != 1)
    if queries > 1 or heads == shared or not is_plain or has_mask_of_heads:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    grouped = query.reshape(rows, shared, heads // shared, head_dim)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None
