"""Tensors laid out side by side in one buffer, alike at the sender and at every receiver.

A receiver that keeps only parts of the tensors, such as a rank of a tensor-parallel engine, is sent only these parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.resharding import Box
from rl_core.weights import ITEM_BYTES, Manifest, TensorSpec, Transport, buckets, num_bytes

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

    def dims(self, shape: Sequence[int]) -> tuple[Box, tuple[int | None, ...]] | None:
        """Return the region of a tensor as a box, and the dim of the region along each dim of the tensor, None along
        which it has one value; None if it is not a box.

        Args:
            shape: Shape of the tensor.
        """
        left = {dim: extent for dim, extent in enumerate(self.size) if extent != 1}
        box, along = [], []
        for place, extent in enumerate(shape):
            stride = prod(shape[place + 1 :])
            start = self.offset // stride % extent if extent and stride else 0
            dim = next((dim for dim in left if self.stride[dim] == stride), None) if extent > 1 else None
            stop = start + (1 if dim is None else left.pop(dim))
            if stop > extent:
                return None
            box.append((start, stop))
            along.append(dim)
        return None if left else (tuple(box), tuple(along))

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


def in_boxes(parts: Parts, shapes: Mapping[str, Sequence[int]]) -> Parts:
    """Return only parts that are boxes; a tensor with another part, such as every other row, is kept whole."""
    return {name: found for name, found in parts.items() if all(region.dims(shapes[name]) for region in found)}


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

    @property
    def boxes(self) -> Sequence[Box]:
        """Parts of the tensor that are here, as boxes; `ValueError` if one is not."""
        if self.parts is None:
            return [tuple((0, extent) for extent in self.spec.shape)]
        found = [part.dims(self.spec.shape) for part in self.parts]
        if None in found:
            raise ValueError(f"a part of {self.spec.name} is not a box")
        return [each[0] for each in found if each is not None]

    def boxed(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the parts in a uint8 buffer, each with the dims of its box."""
        if self.parts is None:
            return [self.view(buffer)]
        views = []
        for part, place in self._places(buffer):
            found = part.dims(self.spec.shape)
            assert found is not None, self.spec.name
            box, along = found
            strides = [0 if dim is None else place.stride(dim) for dim in along]
            views.append(place.as_strided([stop - start for start, stop in box], strides))
        return views

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


class ArrivedBucket:
    """Tensors that have arrived in the buffer of a bucket, whole or in parts.

    Args:
        bucket: The bucket.
        buffer: uint8, its bytes.

    Attributes:
        slots: Places of the tensors that have arrived at least in part.
    """

    def __init__(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        self.slots = [slot for slot in bucket.slots if slot.parts is None or slot.num_bytes]
        dtypes = {DTYPES[slot.spec.dtype] for slot in self.slots}
        # These views do not know the buffer as their base.
        self._typed = {dtype: buffer.view(dtype).data for dtype in dtypes}

    def read(self, slot: Slot, region: Region) -> torch.Tensor:
        """Return a part of a tensor, without a copy: of a whole tensor any, otherwise one that has arrived."""
        typed = self._typed[DTYPES[slot.spec.dtype]]
        start = typed.storage_offset() + slot.offset // typed.itemsize
        if slot.parts is None:
            return typed.as_strided(region.size, region.stride, start + region.offset)
        wanted = region.once()
        for part in slot.parts:
            if part == wanted:
                strides, stride = [], 1
                for extent, original in zip(reversed(part.size), reversed(region.stride), strict=True):
                    strides.append(stride if original else 0)
                    stride *= extent
                return typed.as_strided(region.size, strides[::-1], start)
            start += part.num_values
        raise KeyError(f"{slot.spec.name}: this part has not arrived")

    def leave(self) -> None:
        """Free the buffer, even if somebody still has this object."""
        for typed in self._typed.values():
            typed.set_()


@dataclass(frozen=True)
class Layout:
    """The buckets of one transfer.

    Args:
        buckets: Buckets in the order of the transfer.
        fingerprint: Tells two manifests apart in a handshake, their versions included, and the parts that travel.
        manifest: Tells two manifests apart, whatever parts travel.
        parts: Parts of each tensor that travel.
    """

    buckets: tuple[Bucket, ...]
    fingerprint: str
    manifest: str
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
        return Layout(tuple(buckets), fingerprint, self.manifest, parts)

    def grouped(self, buckets: Sequence[int]) -> Layout:
        """Return the same tensors in other buckets.

        Args:
            buckets: Number of the bucket of each tensor, in order; none is empty.
        """
        groups: list[list[TensorSpec]] = [[] for _ in set(buckets)]
        for spec, number in zip((slot.spec for each in self.buckets for slot in each.slots), buckets, strict=True):
            groups[number].append(spec)
        return replace(self, buckets=tuple(_bucket(index, specs, self.parts) for index, specs in enumerate(groups)))


def layout_of(manifest: Manifest, transport: Transport) -> Layout:
    """Return the layout of a transfer; raises as `lay_out`."""
    return lay_out(manifest, transport.bucket_bytes)


def exchanges_parts(manifest: Manifest, transport: Transport) -> bool:
    """Return whether the ranks of the policy bring together the parts that each one's receiver keeps, instead of whole
    tensors."""
    return manifest.is_held_in_parts and transport.every_rank_sends


def lay_out(manifest: Manifest, bucket_bytes: int) -> Layout:
    """Lay a manifest out in buckets.

    Args:
        manifest: Tensors to lay out.
        bucket_bytes: Maximum number of bytes of a bucket, a single larger tensor excepted.

    Raises:
        WeightSyncError: If no transport carries the dtype of a tensor, with its name.
    """
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise WeightSyncError(f"{spec.name} has dtype {spec.dtype}; transports carry {allowed}", (spec.name,))
    tensors = [(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors]
    fingerprint = hashlib.sha256(repr((manifest.version, tensors)).encode()).hexdigest()[:16]
    laid_out = [_bucket(index, specs, {}) for index, specs in enumerate(buckets(manifest.tensors, bucket_bytes))]
    return Layout(tuple(laid_out), fingerprint, fingerprint)


def _bucket(index: int, specs: Sequence[TensorSpec], parts: Parts) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        kept = parts.get(spec.name)
        size = num_bytes(spec) if kept is None else sum(part.num_values for part in kept) * ITEM_BYTES[spec.dtype]
        slots.append(Slot(spec, offset, size, kept))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Bucket(index, tuple(slots), offset)
