"""The formats in which engines serve linear layers, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rl_core.torch.quantization.float8 import Float8Recipe, Float8Weight, largest_values
from rl_core.torch.quantization.int4 import Int4Format
from rl_core.torch.quantization.mxfp4 import MXFP4Format


class QuantizedWeight(Protocol):
    """A quantised matrix."""

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix that it stands for, `[outputs, inputs]`, rounded once to a dtype."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return its tensors in a file, by the suffix of their names in place of `weight`."""


class WeightFormat(Protocol):
    """A format of quantised matrices `[outputs, inputs]`."""

    @property
    def name(self) -> str:
        """Name, as configs write it."""

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs that share a scale; 0 if all inputs of an output do."""

    @property
    def step(self) -> int:
        """Number of inputs that a file stores together; it divides the inputs of every matrix."""

    @property
    def file_format(self) -> str:
        """Its name in `quantization_config` of compressed-tensors."""

    def quantise(self, weight: Tensor) -> QuantizedWeight:
        """Quantise a matrix of any float dtype, on its device.

        Raises:
            ValueError: If it is not a matrix, or its groups do not fill its rows.
        """

    def scheme(self) -> Mapping[str, object]:
        """Return how `quantization_config` of compressed-tensors describes the weights."""


@dataclass(frozen=True)
class StoredFloat8:
    """An 8-bit matrix with a scale per output.

    Args:
        weight: Values and scales.
    """

    weight: Float8Weight

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """See `QuantizedWeight.dequantise`."""
        return self.weight.dequantise(dtype)

    def tensors(self) -> Mapping[str, Tensor]:
        """See `QuantizedWeight.tensors`."""
        return {"weight": self.weight.values, "weight_scale": self.weight.scales}


def _same(largest: Tensor) -> Tensor:
    return largest


@dataclass(frozen=True)
class Float8Format:
    """8-bit floating point with a scale per output.

    Args:
        largest: Function from the largest absolute values of a part of each row to those of whole rows.
    """

    largest: Callable[[Tensor], Tensor] = _same

    name: ClassVar[str] = "float8"
    group_size: ClassVar[int] = 0
    step: ClassVar[int] = 1
    file_format: ClassVar[str] = "float-quantized"

    def quantise(self, weight: Tensor) -> StoredFloat8:
        """See `WeightFormat.quantise`."""
        recipe = Float8Recipe("per_channel")
        return StoredFloat8(
            recipe.quantise_with(weight, recipe.scales(self.largest(largest_values(weight, "per_channel"))))
        )

    def scheme(self) -> Mapping[str, object]:
        """See `WeightFormat.scheme`."""
        return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


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
