"""8-bit weights with a scale for each block, as DeepSeek-V3 is published."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.torch.files.stored import Slices, StoredTensor, bounds_of

BLOCK = 128
"""Rows and columns that share a scale."""


@dataclass(frozen=True)
class BlockScaledWeight:
    """A matrix of 8-bit values, each to be multiplied by the scale of its block.

    Args:
        values: `[rows, columns]`.
        scales: `[rows / 128, columns / 128]`, rounded up.
    """

    values: StoredTensor
    scales: StoredTensor

    dtype = "block-scaled FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.values.shape

    def read(self, slices: Slices) -> Tensor:
        """Return a part of it in float32.

        Raises:
            ValueError: If the scales are not those of blocks of 128 by 128.
        """
        expected = tuple(-(-extent // BLOCK) for extent in self.shape)
        if self.scales.shape != expected:
            raise ValueError(
                f"{self.scales.name} has shape {self.scales.shape}, and blocks of {BLOCK} by {BLOCK} of a weight "
                f"of shape {self.shape} have {expected}; convert the model to bfloat16 first"
            )
        bounds = bounds_of(slices, self.shape)
        scales = self.scales.read(tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in bounds)).float()
        for dim, (start, stop) in enumerate(bounds):
            scales = scales.index_select(dim, torch.arange(start, stop) // BLOCK - start // BLOCK)
        return self.values.read(slices).float().mul_(scales)
