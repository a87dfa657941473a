"""4-bit integers with a scale for each group of inputs, as GPTQ- and AWQ-like checkpoints have them (symmetric, w4a16).

A matrix `[outputs, inputs]` is stored as integers from -8 to 7 and a scale for each group of consecutive inputs of an
output, in the dtype of the model. It stands for `value * scale`, rounded to that dtype. Files hold eight integers, each
plus 8, in an int32, the first in the lowest bits: format `pack-quantized` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_core.torch.quantization.groups import grouped, largest_of_groups, wide_dtype

LEAST, MOST = -8, 7
_PER_INT32 = 8
_BITS = 4
_HALF_RANGE = 7.5
"""Largest absolute value of a group, in scales: halfway between the last integers of both sides."""


@dataclass(frozen=True)
class Int4Weight:
    """A quantised matrix.

    Args:
        values: Int8 `[outputs, inputs]`, from -8 to 7.
        scales: `[outputs, groups]` in the dtype of the matrix.
    """

    values: Tensor
    scales: Tensor

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return `value * scale`, rounded once.

        Args:
            dtype: Dtype of the result; that of the scales if None.
        """
        wide = wide_dtype(dtype or self.scales.dtype)
        values = grouped(self.values, self.scales.shape[1]).to(wide)
        return (values * self.scales[..., None].to(wide)).flatten(1).to(dtype or self.scales.dtype)

    def half_steps(self) -> Tensor:
        """Return largest error of each value, float64 `[outputs, inputs]`: half a step of 1, times the scale, before
        the rounding of the product to the dtype. A little more covers the rounding of scales."""
        group_size = self.values.shape[1] // self.scales.shape[1]
        # at 7.5 scales, a scale that was rounded down by a half bit leaves the largest value beyond the last half step
        slack = _HALF_RANGE * torch.finfo(self.scales.dtype).eps
        return (self.scales.double() * (0.5 + slack)).repeat_interleave(group_size, 1)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of a file, by the suffix that stands in place of `weight`."""
        shifted = (self.values.to(torch.int32) - LEAST).unflatten(1, (-1, _PER_INT32))
        shifts = torch.arange(_PER_INT32, device=shifted.device, dtype=torch.int32) * _BITS
        packed = (shifted << shifts).sum(2, dtype=torch.int32)
        shape = torch.tensor(self.values.shape, dtype=torch.int64)
        return {"weight_packed": packed, "weight_scale": self.scales, "weight_shape": shape}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Int4Weight:
        """Return the inverse of `tensors`."""
        packed = tensors["weight_packed"]
        shifts = torch.arange(_PER_INT32, device=packed.device, dtype=torch.int32) * _BITS
        values = ((packed[..., None] >> shifts) & 0xF).flatten(1) + LEAST
        return cls(values.to(torch.int8), tensors["weight_scale"])


@dataclass(frozen=True)
class Int4Format:
    """4-bit integers.

    Args:
        group_size: Consecutive inputs that share a scale.
    """

    group_size: int = 128

    name: ClassVar[str] = "int4"
    step: ClassVar[int] = _PER_INT32
    """Number of inputs that a file stores together."""
    file_format: ClassVar[str] = "pack-quantized"

    def quantise(self, weight: Tensor) -> Int4Weight:
        """Quantise a matrix `[outputs, inputs]`; a scale is the largest absolute value of its group, divided by 7.5.

        Raises:
            ValueError: If it is not a matrix, or its groups do not fill its rows.
        """
        largest = largest_of_groups(weight, self.group_size)
        scales = (largest.to(wide_dtype(weight.dtype)) / _HALF_RANGE).to(weight.dtype)
        scales = scales.where(scales != 0, 1.0)
        wide = wide_dtype(weight.dtype)
        quotients = grouped(weight, scales.shape[1]).to(wide) / scales[..., None].to(wide)
        return Int4Weight(quotients.round_().clamp_(LEAST, MOST).flatten(1).to(torch.int8), scales)

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""
        return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size}
