"""What flash attention does between its arguments and its results, by the generation of its kernels.

From the sources that launch the kernels: `csrc/flash_attn/flash_api.cpp` of flash-attn 2.8.3 and torch's copy of it
(FA2), and `hopper/flash_api.cpp` of flash-attn 3 (FA3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ledger.costs import Costs, Work

FLOAT32 = 4
"""Bytes of a number in float32."""
_RNG_STATE = 16
"""Bytes of the state of a generator that torch returns; it is zero without dropout."""


class Inner(NamedTuple):
    """Work of the backward pass in addition to its largest kernel.

    Args:
        by_queries: Work that the gradient by the queries takes.
        by_groups: Work that groups of heads with one key take.
    """

    by_queries: Work
    by_groups: Work


def inner_backward(
    generation: str, num_tokens: int, num_heads: int, num_key_heads: int, head_dim: int, *, itemsize: int = 2
) -> Inner:
    """Work of a backward pass of packed rows in addition to its largest kernel.

    Both generations sum the gradient by the queries in float32: the first kernel clears it, and also reads the gradient
    by the output; the largest adds to it; the last one converts it. Blocks of keys add at different times, so this is
    the smallest traffic: each number is read and written once in the largest kernel, whatever the number of blocks.

    With groups of heads, FA2 writes the gradients by keys and values for all heads of queries and sums them by an
    operation for each. FA3 sums them in float32 in memory that it clears before, and converts it afterwards.

    Args:
        generation: `FA2` or `FA3`.
        num_tokens: Number of tokens.
        num_heads: Number of heads of queries.
        num_key_heads: Number of heads of keys and values.
        head_dim: Entries of a head.
        itemsize: Bytes of an entry of keys.
    """
    rounded = -(-head_dim // (32 if head_dim <= 128 else 64)) * (32 if head_dim <= 128 else 64)
    summed = num_tokens * num_heads * rounded * FLOAT32
    by_queries = Work(2, 4 * summed + num_tokens * num_heads * head_dim * itemsize)
    if num_heads == num_key_heads:
        return Inner(by_queries, Work())
    if generation == "FA2":
        return Inner(by_queries, Work(2, 2 * 2 * num_tokens * num_heads * head_dim * itemsize))
    return Inner(by_queries, Work(4, 2 * 4 * num_tokens * num_key_heads * rounded * FLOAT32))


def inner_costs(operation: torch._ops.OpOverload, args: Sequence[Any]) -> Costs:
    """Return the costs of an operation of flash attention in addition to its largest kernel.

    Args:
        operation: Operation of torch or of a package.
        args: Positional arguments.
    """
    name = operation.__name__
    if "backward" not in name and "bwd" not in name:
        # The operator of torch returns zeros as the state of its generator.
        return Costs(other=Work(1, _RNG_STATE)) if operation.namespace == "torch_attn" else Costs()
    query, key = args[1], args[2]
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    is_packed = query.dim() == 3
    heads = -2
    num_tokens = query.shape[0] if is_packed else query.shape[0] * query.shape[1]
    inner = inner_backward(
        generation_of(operation.namespace),
        num_tokens,
        query.shape[heads],
        key.shape[heads],
        query.shape[-1],
        itemsize=key.element_size(),
    )
    return Costs(attention=inner.by_queries + inner.by_groups)


def generation_of(namespace: str) -> str:
    """Return the generation of the kernels that an operation of a namespace runs, `FA2` or `FA3`."""
    if namespace == "torch_attn":
        return current_flash_attention_impl() or "FA2"
    return "FA3" if namespace == "flash_attn_3" else "FA2"
