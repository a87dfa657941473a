"""8-bit weights with a scale for each block, as DeepSeek-V3 is published."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SUFFIX = "_scale_inv"
"""Ends the name of the tensor that holds a weight's scales, after the weight's own name."""

BLOCK = 128
"""Rows and columns that share a scale."""


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a matrix."""
    return tuple(-(-extent // BLOCK) for extent in shape)


def dequantised(
    values: Tensor,
    shape: tuple[int, ...],
    slices: tuple[slice, ...],
    read_scales: Callable[[tuple[slice, ...]], Tensor],
) -> Tensor:
    """A slice of a matrix in float32, `value * scale of its block`.

    Args:
        values: the slice of the 8-bit matrix.
        shape: of the whole matrix.
        slices: which slice it is; empty for all of it, fewer than dims for all of the rest.
        read_scales: a slice of the scales.
    """
    padded = (*slices, *(slice(None),) * (len(shape) - len(slices)))
    bounds = [part.indices(extent)[:2] for part, extent in zip(padded, shape, strict=True)]
    scales = read_scales(tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in bounds)).float()
    for dim, (start, stop) in enumerate(bounds):
        scales = scales.index_select(dim, torch.arange(start, stop) // BLOCK - start // BLOCK)
    return values.float().mul_(scales)
