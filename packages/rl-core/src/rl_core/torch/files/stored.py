"""Tensors in open safetensors files, read slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Slices = tuple[slice, ...]
"""A part of a tensor: empty for all of it, fewer than its dims for all of the rest."""

FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes, by their names in safetensors, whose values are weights as they are."""


class StoredWeight(Protocol):
    """A weight of a model, in one tensor of its files or in several that it is computed from."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""

    @property
    def dtype(self) -> str:
        """Dtype by its name in safetensors (`F32`, `BF16`, `F8_E4M3`, ...); of several tensors the name of their
        quantisation."""

    def read(self, slices: Slices) -> Tensor:
        """Return a part of it; little more than that is read."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        file: Open, of `safetensors`.
        name: Name of the tensor.
    """

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """By its name in safetensors."""
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self, slices: Slices) -> Tensor:
        """Return a part of it, the only one that is read."""
        part: Tensor = self.file.get_slice(self.name)[slices] if slices else self.file.get_tensor(self.name)
        return part


def bounds_of(slices: Slices, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return first place and end of a part in each dim."""
    padded = (*slices, *(slice(None),) * (len(shape) - len(slices)))
    return [part.indices(extent)[:2] for part, extent in zip(padded, shape, strict=True)]
