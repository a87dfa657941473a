"""Tokens of a row on each context-parallel rank.

A row is cut into `2 * size` equal slices; each rank has one from the start and its mirror from the end, so that causal
attention costs every rank the same. Megatron's and Transformer Engine's convention.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag_slices(length: int, size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and end of the two slices of a rank.

    Raises:
        ValueError: If the row cannot be cut into equal slices.
    """
    if length % (2 * size):
        raise ValueError(f"{length} tokens cannot be cut into {2 * size} equal slices")
    width = length // (2 * size)
    mirror = 2 * size - 1 - rank
    return (rank * width, (rank + 1) * width), (mirror * width, (mirror + 1) * width)


def zigzag_tokens(length: int, size: int, rank: int) -> Tensor:
    """int64 indices of a rank's tokens; a single rank has any number of them."""
    if size == 1:
        return torch.arange(length)
    return torch.cat([torch.arange(*part) for part in zigzag_slices(length, size, rank)])


def zigzag_order(length: int, size: int) -> Tensor:
    """int64 `[length]`, indices of the tokens of all ranks, one rank after another."""
    return torch.cat([zigzag_tokens(length, size, rank) for rank in range(size)])
