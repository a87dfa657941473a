"""8-bit floating point (E4M3) with a scale per tensor, per output channel or per block.

A matrix is stored as `float8_e4m3fn` values and float32 scales, which mean `value * scale`. The format is defined in
https://arxiv.org/abs/2209.05433: 4 bits of exponent (bias 7), 3 of mantissa, no infinity, and 448 as the largest value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Granularity = Literal["per_tensor", "per_channel", "per_block"]
"""Values that share a scale: all, one row (an output of a linear layer), or a block of `BLOCK` by `BLOCK`."""

LARGEST = 448.0
"""Largest value of E4M3."""
SMALLEST_EXPONENT = -6
"""Exponent of the smallest normal value; below it all steps are equal."""
MANTISSA_BITS = 3
BLOCK = 128
"""Rows and columns of a block."""

_TINY = torch.finfo(torch.float32).tiny
_ROUNDING = 2.0**-20
"""More than the rounding of a quotient and a product in float32, relative to them."""


@dataclass(frozen=True)
class Float8Recipe:
    """How a matrix is quantised.

    Args:
        granularity: Values that share a scale.
        has_power_of_two_scales: Round scales up to powers of two, whose products with values are exact.
        smallest_scale: Lower bound of scales. The default keeps the scale of zeros from being zero.
        multiplies: Multiply by the reciprocal of a scale instead of dividing by it, as some kernels do. The results
            differ only for quotients next to the middle of two values.
    """

    granularity: Granularity
    has_power_of_two_scales: bool = False
    smallest_scale: float = _TINY
    multiplies: bool = False

    def quantise(self, weight: Tensor) -> Float8Weight:
        """Quantise a matrix `[rows, columns]` of any float dtype, on its device.

        A scale is the largest absolute value that shares it, divided by 448. Infinite and undefined values give scales
        that are not finite, which `faults` reports.

        Raises:
            ValueError: If it is not a matrix.
        """
        return self.quantise_with(weight, self.scales(largest_values(weight, self.granularity)))

    def scales(self, largest: Tensor) -> Tensor:
        """Return the scales, float32, of the largest absolute values that share each of them.

        Args:
            largest: From `largest_values`; for a part of a matrix, the largest of all parts.
        """
        # The divisor is a tensor, because torch multiplies by the reciprocal of a number.
        scales = largest.float() / torch.tensor(LARGEST, device=largest.device)
        scales = scales.clamp_min(self.smallest_scale)
        if not self.has_power_of_two_scales:
            return scales
        # These are the smallest powers of two that are not below. frexp gives mantissas from 0.5 on: 0.5 is a power of
        # two itself.
        mantissa, exponent = torch.frexp(scales)
        rounded = torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))
        return torch.where(scales.isfinite(), rounded, scales)

    def quantise_with(self, weight: Tensor, scales: Tensor) -> Float8Weight:
        """Quantise a matrix with given scales; values beyond 448 times their scale become 448."""
        factors = _expanded(1.0 / scales if self.multiplies else scales, weight.shape, self.granularity)
        quotients = weight.float() * factors if self.multiplies else weight.float() / factors
        values = quotients.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return Float8Weight(values, scales, self.granularity)


@dataclass(frozen=True)
class Float8Weight:
    """A quantised matrix.

    Args:
        values: `float8_e4m3fn` `[rows, columns]`.
        scales: float32; `[1, 1]`, `[rows, 1]` or `[rows / 128, columns / 128]`, rounded up.
        granularity: Values that share a scale.
    """

    values: Tensor
    scales: Tensor
    granularity: Granularity

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `value * scale`, computed in float32 (float64 if that is asked for)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        factors = _expanded(self.scales, self.values.shape, self.granularity).to(wide)
        return self.values.to(wide).mul_(factors).to(dtype)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return its tensors in a file, by their suffix in place of `weight`."""
        return {"weight": self.values, "weight_scale": self.scales}

    def dequantised_columns(self, columns: Tensor) -> Tensor:
        """Return some columns of `dequantise()`, float32 `[rows, columns]`.

        Args:
            columns: int64, the columns.
        """
        scales = self.scales
        if self.granularity == "per_block":
            scales = scales[:, columns // BLOCK].repeat_interleave(BLOCK, 0)[: len(self.values)]
        # 8-bit floats cannot be indexed on every device.
        found = self.values.view(torch.uint8)[:, columns].view(torch.float8_e4m3fn)
        return found.float().mul_(scales)

    def half_steps(self) -> Tensor:
        """Return the largest error of each value that rounding to the nearest explains, float64 `[rows, columns]`.

        It is half the distance to the next value of larger magnitude, times the scale: at most 16 scales, in the top
        binade. A little more covers quotients that are rounded to float32 before they are rounded to 8 bits.
        """
        magnitudes = self.values.double().abs()
        exponents = torch.frexp(magnitudes).exponent - 1
        exponents = torch.where(magnitudes > 0, exponents, SMALLEST_EXPONENT).clamp_min(SMALLEST_EXPONENT)
        steps = torch.ldexp(torch.ones_like(magnitudes), exponents - MANTISSA_BITS)
        factors = _expanded(self.scales, self.values.shape, self.granularity).double()
        return (steps / 2 + magnitudes * _ROUNDING) * factors

    def num_beyond_half_step(self, weight: Tensor) -> int:
        """Return the number of values that rounding to the nearest does not explain; one is too many.

        They are compared in float64.

        Args:
            weight: The matrix that was quantised.
        """
        error = (self.dequantise(torch.float64) - weight.double()).abs_()
        return int((~(error <= self.half_steps())).sum())

    def relative_error(self, weight: Tensor) -> float:
        """Return the root mean square of the errors relative to the matrix; 0 for zeros."""
        exact = weight.double()
        norm = exact.norm()
        return float((self.dequantise(torch.float64) - exact).norm() / norm) if norm else 0.0


def largest_values(weight: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest absolute values of those that share a scale, in the shape of the scales, float32.

    Raises:
        ValueError: If it is not a matrix.
    """
    if weight.ndim != 2:
        raise ValueError(f"a matrix is quantised, got a tensor of shape {tuple(weight.shape)}")
    rows, columns = weight.shape
    magnitudes = weight.abs()
    if granularity == "per_block":
        padded = torch.nn.functional.pad(magnitudes, (0, -columns % BLOCK, 0, -rows % BLOCK))
        return padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).amax(dim=(1, 3)).float()
    if granularity == "per_channel":
        return magnitudes.amax(dim=1, keepdim=True).float()
    return magnitudes.amax().reshape(1, 1).float()


def scale_faults(scales: Tensor, largest: Tensor) -> list[str]:
    """Return the reasons why scales cannot belong to a matrix; empty if they can.

    Args:
        scales: float32, of the matrix after it was quantised.
        largest: From `largest_values` of the matrix.
    """
    undefined = int((~scales.isfinite()).sum())
    zeros = int(((scales <= 0) & (largest > 0)).sum())
    small = int(((scales > 0) & (scales.double() * LARGEST < largest.double() * (1 - _ROUNDING))).sum())
    found = {
        "not finite": undefined,
        "zero or negative, and their weights are not zero": zeros,
        "too small, so that the largest of their weights are cut off": small,
    }
    return [f"{number} of {scales.numel()} scales are {fault}" for fault, number in found.items() if number]


def _expanded(scales: Tensor, shape: torch.Size, granularity: Granularity) -> Tensor:
    """Return the scales in a shape that broadcasts over the matrix."""
    if granularity != "per_block":
        return scales
    rows, columns = shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
