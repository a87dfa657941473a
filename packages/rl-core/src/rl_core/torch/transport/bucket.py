"""Tensors laid out side by side in one buffer, alike at the sender and at every receiver."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

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
class Slot:
    """The place of one tensor in its bucket."""

    spec: TensorSpec
    offset: int
    num_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor that lies here in a uint8 buffer, without a copy."""
        place = buffer[self.offset : self.offset + self.num_bytes]
        return place.view(DTYPES[self.spec.dtype]).view(self.spec.shape)


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
        """The bucket as it travels if only its changes do: one tensor of so many bytes."""
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
        buckets: in the order in which they travel.
        fingerprint: tells two manifests apart in a handshake, their versions included.
    """

    buckets: tuple[Bucket, ...]
    fingerprint: str

    @property
    def capacity(self) -> int:
        """Bytes of a buffer that holds any one of the buckets; at least 1, for no memory can be empty."""
        return max([1, *(bucket.num_bytes for bucket in self.buckets)])


def lay_out(manifest: Manifest, bucket_bytes: int) -> Layout:
    """Lay a manifest out in buckets; raises `WeightSyncError` naming a tensor of a dtype that no transport carries."""
    for spec in manifest.tensors:
        if spec.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise WeightSyncError(f"{spec.name} has dtype {spec.dtype}; transports carry {allowed}", (spec.name,))
    tensors = [(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors]
    fingerprint = hashlib.sha256(repr((manifest.version, tensors)).encode()).hexdigest()[:16]
    laid_out = [_bucket(index, specs) for index, specs in enumerate(buckets(manifest.tensors, bucket_bytes))]
    return Layout(tuple(laid_out), fingerprint)


def _bucket(index: int, specs: list[TensorSpec]) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        size = num_bytes(spec)
        slots.append(Slot(spec, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Bucket(index, tuple(slots), offset)
