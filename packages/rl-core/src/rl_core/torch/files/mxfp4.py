"""4-bit weights of experts with a scale for every 32 of them (MXFP4 of the OCP Microscaling specification), as gpt-oss
is published."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.torch.files.stored import Slices, StoredTensor, bounds_of

GROUP = 32
"""Values that share a scale."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)
"""`[256, 2]`, the values of a byte: the lower half of its bits comes first."""


@dataclass(frozen=True)
class MXFP4Weight:
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
        """Of the matrices as the model has them.

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
