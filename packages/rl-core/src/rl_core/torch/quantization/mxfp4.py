"""4-bit floating point (E2M1) with a power of two for each 32 inputs: MXFP4 of the OCP Microscaling specification 1.0.

A matrix `[outputs, inputs]` is stored as values among 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, and exponents. It stands
for `value * 2 ** exponent`, which bfloat16 holds exactly. Files hold two values in a byte, the first in the lower half,
and exponents plus 127: format `mxfp4-pack-quantized` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_core.torch.quantization.groups import grouped, largest_of_groups, wide_dtype

GROUP = 32
LARGEST = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values, in the order of their codes. The fourth bit of a code is the sign."""
BIAS = 127
_UNDEFINED = 255
"""The exponent that stands for "not a number"."""
_SIGN = 8
_LARGEST_EXPONENT = 2
"""Exponent of 4, the last power of two among the values."""
_ROUNDED_UP = 0.875
"""Mantissa (from 0.5 to 1) from which the exponent of a group is one more: 7 of the scale below would round to 8."""


@dataclass(frozen=True)
class MXFP4Weight:
    """A quantised matrix.

    Args:
        codes: Uint8 `[outputs, inputs]`, from 0 to 15.
        exponents: Uint8 `[outputs, inputs / 32]`, exponents of 2 with a bias of 127.
        dtype: Dtype of the matrix.
    """

    codes: Tensor
    exponents: Tensor
    dtype: torch.dtype = torch.bfloat16

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return `value * 2 ** exponent`.

        Args:
            dtype: Dtype of the result; that of the matrix if None.
        """
        wide = wide_dtype(dtype or self.dtype)
        table = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=wide, device=self.codes.device)
        values = grouped(table[self.codes.int()], self.exponents.shape[1])
        return (values * self._scales(wide)[..., None]).flatten(1).to(dtype or self.dtype)

    def half_steps(self) -> Tensor:
        """Return largest error of each value, float64 `[outputs, inputs]`: half the step to the next value of larger
        magnitude, which is 2 behind 6, times the scale."""
        steps = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0], dtype=torch.float64, device=self.codes.device)
        of_values = grouped(steps[(self.codes % _SIGN).int()], self.exponents.shape[1])
        return (of_values / 2 * self._scales(torch.float64)[..., None]).flatten(1)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of a file, by the suffix that stands in place of `weight`."""
        first, second = self.codes.unflatten(1, (-1, 2)).unbind(2)
        return {"weight_packed": first | (second << 4), "weight_scale": self.exponents}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> MXFP4Weight:
        """Return the inverse of `tensors`."""
        packed = tensors["weight_packed"]
        return cls(torch.stack((packed & 0xF, packed >> 4), 2).flatten(1), tensors["weight_scale"])

    def _scales(self, dtype: torch.dtype) -> Tensor:
        scales = torch.ldexp(torch.ones_like(self.exponents, dtype=dtype), self.exponents.int() - BIAS)
        return scales.masked_fill(self.exponents == _UNDEFINED, torch.nan)


@dataclass(frozen=True)
class MXFP4Format:
    """4-bit floating point with a scale for each 32 inputs."""

    name: ClassVar[str] = "mxfp4"
    group_size: ClassVar[int] = GROUP
    step: ClassVar[int] = 2
    """Number of inputs that a file stores together."""
    file_format: ClassVar[str] = "mxfp4-pack-quantized"

    def quantise(self, weight: Tensor) -> MXFP4Weight:
        """Quantise a matrix `[outputs, inputs]`.

        The exponent of a group is that of its largest absolute value, rounded to one bit of mantissa, less 2. So the
        largest value becomes at most 6, by no more than half a step. That of a group with an infinite or undefined
        value is undefined.

        Raises:
            ValueError: If it is not a matrix, or its groups do not fill its rows.
        """
        largest = largest_of_groups(weight, GROUP).to(wide_dtype(weight.dtype))
        mantissas, exponents = torch.frexp(largest)
        # frexp has mantissas from 0.5 on: exponents are one more than those of values from 1 to 2
        shared = exponents - 1 - _LARGEST_EXPONENT + (mantissas >= _ROUNDED_UP).int()
        shared = shared.where(mantissas != 0, -BIAS).clamp(-BIAS, BIAS)
        exponents = (shared + BIAS).where(largest.isfinite(), _UNDEFINED)
        wide = wide_dtype(weight.dtype)
        quotients = torch.ldexp(grouped(weight, shared.shape[1]).to(wide), -shared[..., None])
        return MXFP4Weight(_codes(quotients).flatten(1), exponents.to(torch.uint8), weight.dtype)

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
            "scale_dtype": "torch.uint8",
        }


def _codes(quotients: Tensor) -> Tensor:
    """Return codes of the nearest values; of two as near, the one with an even code."""
    magnitudes = quotients.abs()
    halves = (magnitudes * 2).round().clamp(max=4)
    ones = magnitudes.round().clamp(max=4) + 2
    twos = (magnitudes / 2).round().clamp(max=3) + 4
    found = torch.where(magnitudes < 2, halves, torch.where(magnitudes < 4, ones, twos))
    return found.to(torch.uint8) + _SIGN * quotients.signbit().to(torch.uint8)
