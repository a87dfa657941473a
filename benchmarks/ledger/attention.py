"""Costs of an attention kernel as the model calls it."""

from __future__ import annotations

import torch

from ledger.costs import Costs
from ledger.counter import CostCounter
from rl_core.torch.training.flops import AttentionShape
from rl_dtensor.model.kernels import Softmax, varlen
from rl_dtensor.model.layout import Segment, Segments


def attention_costs(shape: AttentionShape, num_key_heads: int, num_tokens: int) -> Costs:
    """Return the costs of flash attention over one row, both passes; all that is not the kernel itself is a copy.

    Args:
        shape: Heads of queries.
        num_key_heads: Number of heads of keys and values.
        num_tokens: Number of tokens of the row.
    """
    device = torch.device("meta")
    heads = ((shape.num_heads, shape.key_dim), (num_key_heads, shape.key_dim), (num_key_heads, shape.value_dim))
    query, key, value = (
        torch.empty(1, num_tokens, *sizes, device=device, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
        for sizes in heads
    )
    segments = Segments([Segment((0, num_tokens), (0, num_tokens))], device)
    with CostCounter(device.type) as counter:
        out = varlen()(query, key, value, segments, Softmax())
        out.backward(torch.empty_like(out))
    return counter.costs
