"""Host memory for the bytes of many tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_BYTES = 1 << 28
"""Maximum number of bytes of one allocation; a power of two."""

SMALLEST_BYTES = 1 << 20
"""Rests below this are one allocation."""


class HostSlabs:
    """Bytes end to end in host memory, held in a few allocations.

    The allocator of page-locked memory rounds each request up to a power of two, so one allocation per tensor, or one
    for all tensors, takes up to twice their bytes. Slabs are powers of two themselves, and only a rest of less than
    `SMALLEST_BYTES` is rounded. Slabs of the same sizes also come from the allocator's cache when the same tensors
    leave the device again.

    Args:
        num_bytes: Number of bytes of all tensors.
        is_pinned: True if the memory is page-locked, for copies to and from a device.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self._slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in slab_sizes(num_bytes)]

    @torch.no_grad()
    def write(self, start: int, source: Tensor) -> None:
        """Copy uint8 `[bytes]` here, from the byte `start` on."""
        for part, place in self._parts(start, source):
            part.copy_(place)

    @torch.no_grad()
    def read(self, start: int, target: Tensor) -> None:
        """Fill uint8 `[bytes]` with what is held from the byte `start` on."""
        for part, place in self._parts(start, target):
            place.copy_(part)

    def _parts(self, start: int, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the slabs and the pieces of `other` that go with them."""
        stop, slab_start = start + len(other), 0
        for slab in self._slabs:
            first, last = max(start, slab_start), min(stop, slab_start + len(slab))
            if first < last:
                yield slab[first - slab_start : last - slab_start], other[first - start : last - start]
            slab_start += len(slab)


def slab_sizes(num_bytes: int) -> Iterator[int]:
    """Sizes that add up to `num_bytes`, all but the last a power of two."""
    while num_bytes:
        size = min(SLAB_BYTES, 1 << (num_bytes.bit_length() - 1)) if num_bytes >= SMALLEST_BYTES else num_bytes
        yield size
        num_bytes -= size


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as uint8 `[bytes]`, sharing memory with it."""
    return tensor.detach().view(-1).view(torch.uint8)
