"""Attention of the later tokens of drafts, which follow a row and one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_dtensor.model.kernels import Attend, Softmax
from rl_dtensor.model.layout import Segments

CHUNK = 512
"""Number of queries for which the mask is in memory at a time."""

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values, each `[1, heads, tokens, head_dim]`."""


def attending_from_drafts(attend: Attend, past: list[KeysAndValues]) -> Attend:
    """The attention of one pass of a head: over the row in the first pass, and in later ones also over the tokens of
    the same draft.

    Args:
        attend: Kernel of the first pass.
        past: Keys and values of earlier passes; those of this pass are added.
    """

    def attended(query: Tensor, key: Tensor, value: Tensor, segments: Segments, softmax: Softmax) -> Tensor:
        past.append((key, value))
        if len(past) == 1:
            return attend(query, key, value, segments, softmax)
        row, *drafted = past
        scaling = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
        return draft_attention(query, row, drafted, segments.lengths[0], scaling=scaling)

    return attended


def draft_attention(
    query: Tensor, row: KeysAndValues, drafted: Sequence[KeysAndValues], lengths: Sequence[int], *, scaling: float
) -> Tensor:
    """Attend from a token of a draft to the row up to where the draft begins, and to the tokens of the same draft up to
    itself.

    Every token of the rows begins a draft, so all tensors have the rows' tokens.

    Args:
        query: `[1, heads, tokens, head_dim]`; the token of the draft that begins at each token.
        row: Keys and values of the first pass, over the row.
        drafted: Keys and values of each later pass until this one, over the drafts.
        lengths: Tokens of each row.
        scaling: Scaling of the products.

    Returns:
        `[1, heads, tokens, head_dim]`.
    """
    outputs, start = [], 0
    for length in lengths:
        for first in range(start, start + length, CHUNK):
            own = slice(first, min(first + CHUNK, start + length))
            seen = slice(start, own.stop)
            parts = [(keys[:, :, seen], values[:, :, seen]) for keys, values in (row,)]
            parts += [(keys[:, :, own], values[:, :, own]) for keys, values in drafted]
            keys, values = (torch.cat(each, 2) for each in zip(*parts, strict=True))
            outputs.append(_attend(query[:, :, own], keys, values, first - start, len(drafted), scaling))
        start += length
    return torch.cat(outputs, 2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, before: int, num_drafted: int, scaling: float) -> Tensor:
    """Attend from queries to the keys of the row up to each, and to their own keys of each pass.

    Args:
        query: `[1, heads, queries, head_dim]`.
        keys: `[1, heads, before + queries + num_drafted * queries, head_dim]`.
        values: As `keys`.
        before: Number of keys of the row before that of the first query.
        num_drafted: Number of later passes.
        scaling: Scaling of the products.
    """
    count, repeats = query.shape[2], query.shape[1] // keys.shape[1]
    of_row = torch.ones(count, before + count, dtype=torch.bool, device=query.device).tril(before)
    own = torch.eye(count, dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(repeats, 1),
        values.repeat_interleave(repeats, 1),
        attn_mask=torch.cat([of_row, *[own] * num_drafted], 1),
        scale=scaling,
    )
