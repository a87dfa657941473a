"""Parts of tensors: what a receiver keeps, such as a rank of a tensor-parallel engine, is all that travels to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """A strided part of a contiguous tensor: extents, strides and offset, in values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Region:
        """Return the part of its storage that a view shows."""
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    @property
    def num_values(self) -> int:
        """Number of values."""
        return prod(self.size)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same part of another contiguous tensor, without a copy."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def once(self) -> Region:
        """Return the region with every value once, where it repeats values along a dimension."""
        size = tuple(1 if stride == 0 else extent for extent, stride in zip(self.size, self.stride, strict=True))
        return Region(size, self.stride, self.offset)


Parts = Mapping[str, Sequence[Region]]
"""Name of a tensor to the parts of it that a receiver keeps, of which there may be none; what has no name here is kept
whole."""


def parts_of(read: Mapping[str, Iterable[Region]], shapes: Mapping[str, Sequence[int]]) -> Parts:
    """Return the parts to ask for, given what a receiver reads of each tensor: each once, and none where they are as
    much as the whole."""
    parts = {name: tuple(dict.fromkeys(region.once() for region in regions)) for name, regions in read.items()}
    return {
        name: regions
        for name, regions in parts.items()
        if sum(region.num_values for region in regions) < prod(shapes[name])
    }


def digest_of(parts: Parts) -> str:
    """Tells parts apart; empty if everything is kept whole."""
    return hashlib.sha256(json.dumps(encoded(parts)).encode()).hexdigest()[:16] if parts else ""


def encoded(parts: Parts) -> dict[str, Any]:
    """Return parts as JSON carries them."""
    return {name: [[each.size, each.stride, each.offset] for each in regions] for name, regions in parts.items()}


def decoded(message: Mapping[str, Any]) -> Parts:
    """Return the parts of which `encoded` made a message."""
    return {
        name: tuple(Region(tuple(size), tuple(stride), offset) for size, stride, offset in regions)
        for name, regions in message.items()
    }
