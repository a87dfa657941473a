"""Formats of linear layers that engines serve, by name: `float8`, and two of 4 bits.

Formats of 4 bits have a scale for each group of consecutive inputs of an output.

Int4, as GPTQ- and AWQ-like checkpoints have it (symmetric, w4a16): a matrix `[outputs, inputs]` is stored as integers
from -8 to 7 and scales in the dtype of the model. They mean `value * scale`, rounded to that dtype. Files hold
eight integers, each plus 8, in an int32, the first in the lowest bits: format `pack-quantized` of compressed-tensors.

MXFP4 of the OCP Microscaling specification 1.0: floating point (E2M1) with a power of two for each 32 inputs. A matrix
is stored as values among 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, and exponents, which mean `value * 2 ** exponent`,
which bfloat16 holds exactly. Files hold two values in a byte, the first in the lower half, and exponents plus 127:
format `mxfp4-pack-quantized` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rl_core.torch.quantization.float8 import Float8Recipe, Float8Weight, largest_values

MIN_INTEGER, MAX_INTEGER = -8, 7
_PER_INT32 = 8
_BITS = 4
_HALF_RANGE = 7.5
"""Largest absolute value of a group, in scales: halfway between the last integers of both sides."""

MXFP4_GROUP = 32
LARGEST = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values, in the order of their codes. The fourth bit of a code is the sign."""
BIAS = 127
_UNDEFINED = 255
"""The exponent that means "not a number"."""
_SIGN = 8
_LARGEST_EXPONENT = 2
"""Exponent of 4, the last power of two among the values."""
_ROUNDED_UP = 0.875
"""The exponent of a group is one more from this mantissa (0.5 to 1) on: 7 of the scale below would round to 8."""


@dataclass(frozen=True)
class Float8Format:
    """8-bit floating point with a scale per output.

    Args:
        largest: Function from the largest absolute values of parts of rows to the largest of whole rows; None if rows
            are whole.
    """

    largest: Callable[[Tensor], Tensor] | None = None

    # The name is written in configs, `file_format` in `quantization_config` of compressed-tensors. `group_size`
    # consecutive inputs share a scale, all of an output if it is 0; a file stores `step` inputs together.
    name: ClassVar[str] = "float8"
    group_size: ClassVar[int] = 0
    step: ClassVar[int] = 1
    file_format: ClassVar[str] = "float-quantized"

    def quantise(self, weight: Tensor) -> Float8Weight:
        """Quantise a matrix of any float dtype, on its device.

        Raises:
            ValueError: If it is not a matrix.
        """
        recipe = Float8Recipe("per_channel")
        largest = largest_values(weight, "per_channel")
        largest = largest if self.largest is None else self.largest(largest)
        return recipe.quantise_with(weight, recipe.scales(largest))

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""
        return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def grouped(weight: Tensor, num_groups: int) -> Tensor:
    """Return a matrix `[outputs, inputs]` as `[outputs, groups, inputs / groups]`."""
    return weight.unflatten(1, (num_groups, -1))


def largest_of_groups(weight: Tensor, group_size: int) -> Tensor:
    """Return the largest absolute value of each group, `[outputs, groups]`; not a number if the group holds one that is
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
    """Return the dtype for products and quotients of a dtype: float32, or float64 itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Int4Weight(NamedTuple):
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
            dtype: Dtype of the result; the scales' dtype if None.
        """
        wide = wide_dtype(dtype or self.scales.dtype)
        values = grouped(self.values, self.scales.shape[1]).to(wide)
        return (values * self.scales[..., None].to(wide)).flatten(1).to(dtype or self.scales.dtype)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of a file, by the suffix in place of `weight`."""
        shifted = (self.values.to(torch.int32) - MIN_INTEGER).unflatten(1, (-1, _PER_INT32))
        shifts = torch.arange(_PER_INT32, device=shifted.device, dtype=torch.int32) * _BITS
        packed = (shifted << shifts).sum(2, dtype=torch.int32)
        shape = torch.tensor(self.values.shape, dtype=torch.int64)
        return {"weight_packed": packed, "weight_scale": self.scales, "weight_shape": shape}


@dataclass(frozen=True)
class Int4Format:
    """4-bit integers.

    Args:
        group_size: Consecutive inputs that share a scale.
    """

    group_size: int = 128

    name: ClassVar[str] = "int4"
    step: ClassVar[int] = _PER_INT32
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
        return Int4Weight(quotients.round_().clamp_(MIN_INTEGER, MAX_INTEGER).flatten(1).to(torch.int8), scales)

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""
        return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size}


class MXFP4Weight(NamedTuple):
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
            dtype: Dtype of the result; the matrix's dtype if None.
        """
        wide = wide_dtype(dtype or self.dtype)
        table = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=wide, device=self.codes.device)
        values = grouped(table[self.codes.int()], self.exponents.shape[1])
        return (values * self._scales(wide)[..., None]).flatten(1).to(dtype or self.dtype)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of a file, by the suffix in place of `weight`."""
        first, second = self.codes.unflatten(1, (-1, 2)).unbind(2)
        return {"weight_packed": first | (second << 4), "weight_scale": self.exponents}

    def _scales(self, dtype: torch.dtype) -> Tensor:
        scales = torch.ldexp(torch.ones_like(self.exponents, dtype=dtype), self.exponents.int() - BIAS)
        return scales.masked_fill(self.exponents == _UNDEFINED, torch.nan)


@dataclass(frozen=True)
class MXFP4Format:
    """4-bit floating point with a scale for each 32 inputs."""

    name: ClassVar[str] = "mxfp4"
    group_size: ClassVar[int] = MXFP4_GROUP
    step: ClassVar[int] = 2
    file_format: ClassVar[str] = "mxfp4-pack-quantized"

    def quantise(self, weight: Tensor) -> MXFP4Weight:
        """Quantise a matrix `[outputs, inputs]`.

        The exponent of a group is taken from its largest absolute value, rounded to one bit of mantissa, less 2. The
        largest value becomes at most 6, by no more than half a step. A group with an infinite or undefined value has an
        undefined exponent.

        Raises:
            ValueError: If it is not a matrix, or its groups do not fill its rows.
        """
        largest = largest_of_groups(weight, MXFP4_GROUP).to(wide_dtype(weight.dtype))
        mantissas, exponents = torch.frexp(largest)
        # frexp has mantissas from 0.5 on, so its exponents are one more than with mantissas from 1 on.
        shared = exponents - 1 - _LARGEST_EXPONENT + (mantissas >= _ROUNDED_UP).int()
        shared = shared.where(mantissas != 0, -BIAS).clamp(-BIAS, BIAS)
        exponents = (shared + BIAS).where(largest.isfinite(), _UNDEFINED)
        wide = wide_dtype(weight.dtype)
        quotients = torch.ldexp(grouped(weight, shared.shape[1]).to(wide), -shared[..., None])
        # The codes of the nearest values; of two equally near, the one with an even code.
        magnitudes = quotients.abs()
        halves = (magnitudes * 2).round().clamp(max=4)
        ones = magnitudes.round().clamp(max=4) + 2
        twos = (magnitudes / 2).round().clamp(max=3) + 4
        found = torch.where(magnitudes < 2, halves, torch.where(magnitudes < 4, ones, twos))
        codes = found.to(torch.uint8) + _SIGN * quotients.signbit().to(torch.uint8)
        return MXFP4Weight(codes.flatten(1), exponents.to(torch.uint8), weight.dtype)

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": MXFP4_GROUP,
            "scale_dtype": "torch.uint8",
        }


WeightFormat = Float8Format | Int4Format | MXFP4Format
"""A format of quantised matrices `[outputs, inputs]`."""


def weight_format(name: str, group_size: int) -> WeightFormat:
    """Return a format by name.

    Args:
        name: One of `int4`, `mxfp4`, `float8`.
        group_size: Inputs that share a scale, for `int4`.

    Raises:
        ValueError: If there is no such format.
    """
    formats: Mapping[str, WeightFormat] = {
        "int4": Int4Format(group_size),
        "mxfp4": MXFP4Format(),
        "float8": Float8Format(),
    }
    if name not in formats:
        raise ValueError(f"{name!r} is not a format of weights; choose one of {', '.join(formats)}")
    return formats[name]


@torch.no_grad()
def rounded(weight: Tensor, fmt: WeightFormat) -> Tensor:
    """Return a matrix as it is after it was quantised, in its own dtype.

    Raises:
        ValueError: If it is not a matrix, or its groups do not fill its rows.
    """
    return fmt.quantise(weight).dequantise(weight.dtype)
