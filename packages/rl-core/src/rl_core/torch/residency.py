"""Tensors in host memory: parts of a model that leave the device to others for a while, and reference weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_core.devices import Device
from rl_core.model import ModelPart

SLAB_BYTES = 1 << 28
"""Maximum number of bytes of one allocation; a power of two."""

SMALLEST_BYTES = 1 << 20
"""Rests below this are one allocation."""

MAX_WAIT_S = 60.0
"""Timeout in seconds for a device that has no room for the parts that come back."""
_POLL_S = 0.2


class Residency(ABC):
    """Which parts of a model are on its device.

    Only tensors that the device holds are moved. On `cpu` it holds none, so there is nothing to free and only the order
    of calls is kept: a model whose parameters were offloaded refuses work until they are back.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._away: dict[ModelPart, list[HostOffload]] = {}

    @abstractmethod
    def kept(self, part: ModelPart) -> Iterable[Tensor]:
        """Return the tensors of a part, which come back bit for bit."""

    def lost(self, part: ModelPart) -> Iterable[Tensor]:
        """Return tensors that leave the device with a part and come back as zeros."""
        return ()

    def offload(self, parts: Sequence[ModelPart]) -> None:
        """Free the device of these parts."""
        for part in parts:
            if part not in self._away:
                self._away[part] = [
                    HostOffload(self._held(self.kept(part)), self._device),
                    HostOffload(self._held(self.lost(part)), self._device, keeps=False),
                ]
        self._device.release_memory()

    def onload(self, parts: Sequence[ModelPart]) -> None:
        """Bring these parts back, bit for bit, as soon as the device has room for them.

        The driver of the device takes back the memory of a process that was killed, such as an engine that did not fall
        asleep, some time after its end.
        """
        away = [offloaded for part in parts for offloaded in self._away.pop(part, [])]
        num_bytes, end = sum(offloaded.num_bytes for offloaded in away), time.monotonic() + MAX_WAIT_S
        while (memory := self._device.memory()) is not None and memory.available < num_bytes:
            if time.monotonic() >= end:
                break  # The allocator's error shows what it lacks.
            time.sleep(_POLL_S)
        for offloaded in away:
            offloaded.restore()

    def require(self, *parts: ModelPart) -> None:
        """Raise a `RuntimeError` naming the parts that are needed and away."""
        missing = [part for part in parts if part in self._away]
        if missing:
            raise RuntimeError(f"{' and '.join(missing)} are offloaded; call onload({missing}) first")

    def _held(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if self._device.holds(tensor)]


class ModuleResidency(Residency):
    """Residency of a module that is only computed with: its parameters and buffers."""

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__(device)
        self._module = module
        for tensor in self._held(self.kept("parameters")):
            if not tensor.untyped_storage().resizable():
                # The pages of a tensor that is mapped from a file cannot be freed here.
                tensor.data = tensor.detach().clone()

    def kept(self, part: ModelPart) -> list[Tensor]:
        return [*self._module.parameters(), *self._module.buffers()] if part == "parameters" else []


class HostOffload:
    """Storages whose bytes are in host memory while the tensors on them keep their identity.

    Emptying the storage rather than moving the tensors keeps every alias valid: buffers' views, the optimizer's keys.

    Args:
        tensors: Tensors to offload; those on one storage are offloaded once.
        device: Device of the tensors.
        keeps: True if the bytes come back; otherwise zeros do.

    Attributes:
        num_bytes: Bytes that they take on the device.
    """

    def __init__(self, tensors: Iterable[Tensor], device: Device, *, keeps: bool = True) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._offloaded = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self.num_bytes = sum(num_bytes for _, num_bytes in self._offloaded)
        self._host: HostSlabs | None = None
        if keeps:
            self._host = HostSlabs(self.num_bytes, is_pinned=device.pins_host_memory)
            start = 0
            for storage, num_bytes in self._offloaded:
                self._host.write(start, _as_bytes(storage))
                start += num_bytes
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the bytes back."""
        start = 0
        for storage, num_bytes in self._offloaded:
            storage.resize_(num_bytes)
            if self._host is None:
                _as_bytes(storage).zero_()
            else:
                self._host.read(start, _as_bytes(storage))
            start += num_bytes
        self._offloaded, self._host = [], None


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
        """Fill uint8 `[bytes]` with the bytes from `start` on."""
        for part, place in self._parts(start, target):
            place.copy_(part)

    def _parts(self, start: int, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the slabs with the pieces of `other` that go with them."""
        stop, slab_start = start + len(other), 0
        for slab in self._slabs:
            first, last = max(start, slab_start), min(stop, slab_start + len(slab))
            if first < last:
                yield slab[first - slab_start : last - slab_start], other[first - start : last - start]
            slab_start += len(slab)


def slab_sizes(num_bytes: int) -> Iterator[int]:
    """Yield sizes that add up to `num_bytes`, all but the last a power of two."""
    while num_bytes:
        size = min(SLAB_BYTES, 1 << (num_bytes.bit_length() - 1)) if num_bytes >= SMALLEST_BYTES else num_bytes
        yield size
        num_bytes -= size


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as uint8 `[bytes]`, sharing memory with it."""
    return tensor.detach().view(-1).view(torch.uint8)


class Reference:
    """The weights that a policy is compared with: its initial ones, or ones that follow it.

    It is a copy in host memory of the tensors that a rank trains, exchanged with the model's while the reference is
    read. With adapters it is a copy of only the adapters.

    Args:
        parts: This rank's part of every tensor that trains, the same ones at each call; first called before the first
            step.

    Attributes:
        has_moved: True if these are no longer the initial weights, so that a checkpoint has to hold them; set by who
            restores it from one.
    """

    def __init__(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        self._parts = parts
        held = list(parts())
        is_pinned = any(part.is_cuda for part in held)
        self._host = HostSlabs(sum(part.nbytes for part in held), is_pinned=is_pinned)
        self.has_moved = False
        for start, part in _placed(held):
            self._host.write(start, bytes_of(part))

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Move by `share * (weights - reference)`; a share of 1 copies.

        It is computed in float32 or wider and rounded to the dtype of each tensor. Tensors that are not floating-point
        numbers are copied.
        """
        for start, part in _placed(self._parts()):
            moved = part.detach()
            if share < 1 and part.is_floating_point():
                held = torch.empty_like(moved)
                self._host.read(start, bytes_of(held))
                wide = torch.promote_types(part.dtype, torch.float32)
                moved = torch.lerp(held.to(wide), moved.to(wide), share).to(part.dtype)
            self._host.write(start, bytes_of(moved))
        self.has_moved = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the weights of the reference, in the context; afterwards it has its own again, bit for bit.

        Weights that are read into the model in the context become the reference's.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for start, part in _placed(self._parts()):
            current = part.clone(memory_format=torch.contiguous_format)
            self._host.read(start, bytes_of(part))
            self._host.write(start, bytes_of(current))


def _placed(parts: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each part after the offset of its bytes on the host."""
    start = 0
    for part in parts:
        yield start, part
        start += part.nbytes
