"""Weights in open safetensors files, read slice by slice: plain ones, and quantised ones as models are published.

DeepSeek-V3 has 8-bit weights with a scale for each block. gpt-oss has 4-bit weights of experts with a scale for every
32 of them (MXFP4 of the OCP Microscaling specification).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Slices = tuple[slice, ...]
"""A part of a tensor: empty for all of it, fewer than its dims for all of the rest."""

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes, as safetensors calls them, whose values are weights as they are."""

BLOCK = 128
"""Rows and columns that share a scale."""

GROUP = 32
"""Values that share a scale."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)
"""`[256, 2]`, the values of a byte: the lower half of its bits comes first."""


class StoredTensor(NamedTuple):
    """One tensor of a file.

    Args:
        file: Open, of `safetensors`.
        name: Name of the tensor.
    """

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """Dtype by its name in safetensors."""
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self, slices: Slices) -> Tensor:
        """Return a part of it, the only one that is read."""
        part: Tensor = self.file.get_slice(self.name)[slices] if slices else self.file.get_tensor(self.name)
        return part


def bounds_of(slices: Slices, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first place and end of a part in each dim."""
    padded = (*slices, *(slice(None),) * (len(shape) - len(slices)))
    return [part.indices(extent)[:2] for part, extent in zip(padded, shape, strict=True)]


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
        """Shape of the matrix."""
        return self.values.shape

    def read(self, slices: Slices) -> Tensor:
        """Return a part of it in float32.

        Raises:
            ValueError: If the scales do not belong to blocks of 128 by 128.
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


@dataclass(frozen=True)
class StoredMXFP4:
    """Matrices of 4-bit values, two to a byte, in groups along the dim that a product sums over. They are stored
    transposed: the model has `[experts, inputs, outputs]`.

    Args:
        blocks: Uint8 `[experts, outputs, inputs / 32, 16]`.
        scales: Uint8 `[experts, outputs, inputs / 32]`, exponents of 2 with a bias of 127.
    """

    blocks: StoredTensor
    scales: StoredTensor

    dtype = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices as the model has them.

        Raises:
            ValueError: If values and scales are not groups of 32.
        """
        blocks, scales = self.blocks.shape, self.scales.shape
        if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
            raise ValueError(
                f"{self.blocks.name} has shape {blocks} and {self.scales.name} {scales}, which are not groups of "
                f"{GROUP} values; convert the model to bfloat16 first"
            )
        experts, outputs, groups, _ = blocks
        return experts, groups * GROUP, outputs

    def read(self, slices: Slices) -> Tensor:
        """Return a part of them in bfloat16, which holds every value exactly.

        Raises:
            ValueError: As `shape`.
        """
        (first, last), (start, stop), (top, bottom) = bounds_of(slices, self.shape)
        part = (slice(first, last), slice(top, bottom), slice(start // GROUP, -(-stop // GROUP)))
        blocks, scales = self.blocks.read(part), self.scales.read(part).view(torch.float8_e8m0fnu)
        found = torch.empty(last - first, stop - start, bottom - top, dtype=torch.bfloat16)
        offset = start % GROUP
        for expert, (packed, scale) in enumerate(zip(blocks, scales, strict=True)):
            values = _PAIRS[packed.int()].flatten(2) * scale.to(torch.bfloat16)[..., None]
            found[expert] = values.flatten(1)[:, offset : offset + stop - start].T
        return found


StoredWeight = StoredTensor | BlockScaledWeight | StoredMXFP4
"""A weight of a model, in one tensor of its files or in several that it is computed from."""
