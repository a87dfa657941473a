"""Which tokens of a row each context-parallel rank has."""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag(length: int, num_ranks: int, rank: int) -> Tensor:
    """Token indices of a rank: of `2 * num_ranks` equal slices the one from the start and its mirror from the end.

    Causal attention costs each rank the same that way. Megatron's and Transformer Engine's convention.

    Args:
        length: tokens of the row, a multiple of `2 * num_ranks` where there is more than one rank.
    """
    if num_ranks == 1:
        return torch.arange(length)
    if length % (2 * num_ranks):
        raise ValueError(f"{length} tokens cannot be cut into {2 * num_ranks} equal slices")
    size = length // (2 * num_ranks)
    mirror = 2 * num_ranks - 1 - rank
    return torch.cat([torch.arange(rank * size, (rank + 1) * size), torch.arange(mirror * size, (mirror + 1) * size)])
