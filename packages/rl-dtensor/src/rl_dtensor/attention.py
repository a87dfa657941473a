"""Causal attention within each row, over rows that lie end to end or side by side and may be split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from rl_dtensor.layout import Context, Layout, Segments
from rl_dtensor.parallel.collectives import exchange, gather

ROWS = "rl_rows"
"""Name under which `transformers` models find this attention."""

ROW_LAYERS = {"full_attention", "sliding_attention"}


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # the rows' bounds say it all
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row, as an attention function of `transformers`.

    Half precision on CUDA runs packed rows as one variable-length flash attention, all else goes row by row: both skip
    the work between rows that a block-diagonal mask would pay for. Padding on the right needs no mask: no token of the
    row comes after it.

    Args:
        query: `[batch, heads, tokens, head_dim]`; `key` and `value` may have fewer heads.
        layout: the rows, and which of their tokens this rank has.
        sliding_window: tokens that each token sees, itself included; all before it where None.

    Returns:
        `[batch, tokens, heads, head_dim]`.
    """
    context = layout.context
    if context is None:
        out = _attend(query, key, value, layout.segments, scaling, dropout, sliding_window)
    elif context.method == "all_gather":
        places = layout.key_places
        key, value = (gather(part, 2, context.group).index_select(2, places) for part in (key, value))
        out = _attend(query, key, value, layout.segments, scaling, dropout, sliding_window)
    else:
        key, value = (_repeated(part, context.size) for part in (key, value))
        query, key, value = (
            _to_heads(part, context).index_select(2, layout.key_places) for part in (query, key, value)
        )
        out = _attend(query, key, value, layout.whole_rows, scaling, dropout, sliding_window)
        out = _to_tokens(out.index_select(2, layout.rank_places), context)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """`[batch, heads, tokens, head_dim]`; the segments cover the queries in order."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and is_half and dropout == 0.0 and len(query) == 1:
        return _flash(query, key, value, segments, scaling, window)
    outputs = [
        _segment(
            query[:, :, slice(*segment.query)],
            key[:, :, slice(*segment.key)],
            value[:, :, slice(*segment.key)],
            scaling=scaling,
            dropout=dropout,
            window=window,
        )
        for segment in segments.items
    ]
    return torch.cat(outputs, dim=2)


def _segment(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Attention of the last queries of a row to all its keys."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_queries < num_keys or (window is not None and num_keys > window):
        place = torch.arange(num_keys, device=query.device)
        distance = place[num_keys - num_queries :, None] - place
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One variable-length flash attention; its causal mask, too, puts the last query at the last key."""
    if segments.keys is not None:
        key, value = key.index_select(2, segments.keys), value.index_select(2, segments.keys)
    flat = (part[0].transpose(0, 1) for part in (query, key, value))
    out = varlen_attn(
        *flat,
        segments.query_ends,
        segments.key_ends,
        *segments.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(0, 1)[None]


def _repeated(x: Tensor, size: int) -> Tensor:
    """Key or value heads as often as they must be for every rank to have one."""
    heads = x.shape[1]
    return x if heads % size == 0 else x.repeat_interleave(size // heads, 1)


def _to_heads(x: Tensor, context: Context) -> Tensor:
    """`[batch, heads, own tokens, head_dim]` as `[batch, heads / size, tokens in the order of ranks, head_dim]`."""
    parts = torch.stack(x.chunk(context.size, 1))  # [size, batch, heads / size, own, head_dim]
    ones = [1] * context.size
    return torch.cat(exchange(parts, ones, ones, context.group).unbind(0), 2)


def _to_tokens(x: Tensor, context: Context) -> Tensor:
    """The way back from `_to_heads`."""
    parts = torch.stack(x.chunk(context.size, 2))
    ones = [1] * context.size
    return torch.cat(exchange(parts, ones, ones, context.group).unbind(0), 1)


def attention_for(config: PreTrainedConfig, *, packed: bool, split: bool, supports_sdpa: bool) -> str:
    """The attention implementation to ask `transformers` for.

    Args:
        packed: whether rows lie end to end.
        split: whether rows are split over ranks, by context or sequence parallelism.
        supports_sdpa: whether the model's attention is a plain softmax of products (`_supports_sdpa` of its class).

    Raises:
        ValueError: where rows of this model cannot be packed or split without one seeing another, or without changing
        its attention.
    """
    settings = config.get_text_config().to_dict()
    plain = supports_sdpa and settings.get("attn_logit_softcapping") is None
    foreign = sorted(set(settings.get("layer_types") or []) - ROW_LAYERS)
    if plain and not foreign:
        return ROWS
    if packed or split:
        why = f"layers of type {', '.join(foreign)}" if foreign else "attention that is no plain softmax of products"
        advice = "sequence_packing.enabled=false" if packed else "context_parallel_size=1 and sequence_parallel=false"
        raise ValueError(
            f"rows of a {config.model_type} model cannot be {'packed' if packed else 'split'}: it has {why}; "
            f"set {advice}"
        )
    return "sdpa" if plain else "eager"


AttentionInterface.register(ROWS, row_attention)
AttentionMaskInterface.register(ROWS, lambda *_, **__: None)
