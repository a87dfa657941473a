"""Groups of consecutive inputs of an output, which share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(weight: Tensor, num_groups: int) -> Tensor:
    """Return a matrix `[outputs, inputs]` as `[outputs, groups, inputs / groups]`."""
    return weight.unflatten(1, (num_groups, -1))


def largest_of_groups(weight: Tensor, group_size: int) -> Tensor:
    """Return largest absolute value of each group, `[outputs, groups]`; not a number if the group holds one that is
    not.

    Raises:
        ValueError: If the weight is not a matrix, or its groups do not fill its rows.
    """
    if weight.ndim != 2:
        raise ValueError(f"a matrix is quantised, got a tensor of shape {tuple(weight.shape)}")
    if weight.shape[1] % group_size:
        raise ValueError(f"groups of {group_size} do not fill rows of {weight.shape[1]} inputs")
    return grouped(weight, weight.shape[1] // group_size).abs().amax(2)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return dtype in which values of a dtype are multiplied and divided: float32, or float64 itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32
