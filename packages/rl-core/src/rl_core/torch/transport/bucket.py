"""Tensors laid out side by side in one buffer, alike at the sender and at every receiver.

A receiver that keeps only parts of the tensors, such as a rank of a tensor-parallel engine, is sent only these parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, buckets, num_bytes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Torch's dtype by its name in a manifest."""

CHANGES = "rl.changes"
"""Name of the tensor that holds the changes of a bucket."""

ALIGNMENT = 64
"""Bytes; a tensor's place starts at a multiple, so that it can be viewed as any dtype."""


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
"""Name of a tensor to the parts of it that a receiver keeps, perhaps none; other tensors are kept whole."""


def parts_to_send(read: Mapping[str, Iterable[Region]], shapes: Mapping[str, Sequence[int]]) -> Parts:
    """Return the parts to ask for, given what a receiver reads of each tensor: each once, and none where they are as
    much as the whole."""
    parts = {name: tuple(dict.fromkeys(region.once() for region in regions)) for name, regions in read.items()}
    return {
        name: regions
        for name, regions in parts.items()
        if sum(region.num_values for region in regions) < prod(shapes[name])
    }


def digest_of(parts: Parts) -> str:
    """Return a digest that differs for other parts; empty if everything is kept whole."""
    return hashlib.sha256(json.dumps(encoded(parts)).encode()).hexdigest()[:16] if parts else ""


def encoded(parts: Parts) -> dict[str, Any]:
    """Return parts as JSON carries them."""
    return {name: [[each.size, each.stride, each.offset] for each in regions] for name, regions in parts.items()}


def decoded(message: Mapping[str, Any]) -> Parts:
    """Return the parts that `encoded` made a message of."""
    return {
        name: tuple(Region(tuple(size), tuple(stride), offset) for size, stride, offset in regions)
        for name, regions in message.items()
    }


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in its bucket, or of parts of it.

    Args:
        parts: One after the other; None if the tensor is there whole.
    """

    spec: TensorSpec
    offset: int
    num_bytes: int
    parts: Sequence[Region] | None = None

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor that is here whole in a uint8 buffer, without a copy."""
        return self._values(buffer).view(self.spec.shape)

    def fill(self, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy the tensor, or the parts of it that belong here, into a uint8 buffer."""
        if self.parts is None:
            self.view(buffer).copy_(tensor)
            return
        whole = tensor.contiguous()
        for part, place in self._places(buffer):
            place.copy_(part.read(whole))

    def put_into(self, whole: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy the parts that are here in a uint8 buffer to their places in a contiguous tensor."""
        for part, place in self._places(buffer):
            part.read(whole).copy_(place)

    def take_out(self, whole: torch.Tensor) -> None:
        """Set the parts that `put_into` has filled in a contiguous tensor to bytes of ones: NaN, or -1."""
        bits = whole.view(getattr(torch, f"int{8 * whole.itemsize}"))
        for part in self.parts or ():
            part.read(bits).fill_(-1)

    def _values(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.num_bytes].view(DTYPES[self.spec.dtype])

    def _places(self, buffer: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
        values, start = self._values(buffer), 0
        for part in self.parts or ():
            yield part, values[start : start + part.num_values].view(part.size)
            start += part.num_values


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors that travel together."""

    index: int
    slots: tuple[Slot, ...]
    num_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple(slot.spec.name for slot in self.slots)

    def packed(self, num_bytes: int) -> Bucket:
        """Return the bucket as it travels if only its changes do: one tensor of so many bytes."""
        return Bucket(self.index, (Slot(TensorSpec(CHANGES, (num_bytes,), "uint8"), 0, num_bytes),), num_bytes)

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zero the bytes between tensors, which the bucket's digest covers; most tensors leave none."""
        for slot in self.slots:
            if slot.num_bytes % ALIGNMENT:
                end = slot.offset + slot.num_bytes
                buffer[end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()


@dataclass(frozen=True)
class Layout:
    """The buckets of one transfer.

    Args:
        buckets: Buckets in the order of the transfer.
        fingerprint: Tells two manifests apart in a handshake, their versions included, and the parts that travel.
        parts: Parts of each tensor that travel.
    """

    buckets: tuple[Bucket, ...]
    fingerprint: str
    parts: Parts = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Bytes of a buffer that holds any one of the buckets; at least 1, for no memory can be empty."""
        return max([1, *(bucket.num_bytes for bucket in self.buckets)])

    def keeping(self, parts: Parts) -> Layout:
        """Return the same buckets with only these parts of their tensors."""
        if not parts:
            return self
        buckets = [_bucket(each.index, [slot.spec for slot in each.slots], parts) for each in self.buckets]
        fingerprint = hashlib.sha256(f"{self.fingerprint} {digest_of(parts)}".encode()).hexdigest()[:16]
        return Layout(tuple(buckets), fingerprint, parts)


def lay_out(manifest: Manifest, bucket_bytes: int) -> Layout:
    """Lay a manifest out in buckets; raises `WeightSyncError` naming a tensor of a dtype that no transport carries."""
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise WeightSyncError(f"{spec.name} has dtype {spec.dtype}; transports carry {allowed}", (spec.name,))
    tensors = [(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors]
    fingerprint = hashlib.sha256(repr((manifest.version, tensors)).encode()).hexdigest()[:16]
    laid_out = [_bucket(index, specs, {}) for index, specs in enumerate(buckets(manifest.tensors, bucket_bytes))]
    return Layout(tuple(laid_out), fingerprint)


def _bucket(index: int, specs: Sequence[TensorSpec], parts: Parts) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        kept = parts.get(spec.name)
        size = num_bytes(spec) if kept is None else sum(part.num_values for part in kept) * ITEM_BYTES[spec.dtype]
        slots.append(Slot(spec, offset, size, kept))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Bucket(index, tuple(slots), offset)
