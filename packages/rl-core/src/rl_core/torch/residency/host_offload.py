"""Tensors whose storage is moved to host memory while others use the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rl_core.devices import Device
from rl_core.torch.residency.host_slabs import HostSlabs


class HostOffload:
    """Storages whose bytes lie in host memory while the tensors on them keep their identity.

    Emptying the storage rather than moving the tensors keeps every alias valid: buffers' views, the optimizer's keys.

    Args:
        tensors: Tensors to offload; those on one storage are offloaded once.
        device: What they lie on.
        keeps: True if the bytes come back; otherwise zeros do.
    """

    def __init__(self, tensors: Iterable[Tensor], device: Device, *, keeps: bool = True) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._offloaded = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self._host: HostSlabs | None = None
        if keeps:
            num_bytes = sum(num_bytes for _, num_bytes in self._offloaded)
            self._host = HostSlabs(num_bytes, is_pinned=device.pins_host_memory)
            for start, storage, _ in self._places():
                self._host.write(start, _as_bytes(storage))
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the bytes back."""
        for start, storage, num_bytes in self._places():
            storage.resize_(num_bytes)
            if self._host is None:
                _as_bytes(storage).zero_()
            else:
                self._host.read(start, _as_bytes(storage))
        self._offloaded, self._host = [], None

    def _places(self) -> Iterator[tuple[int, torch.UntypedStorage, int]]:
        """Offset of each storage's bytes on the host, the storage, and the number of bytes."""
        start = 0
        for storage, num_bytes in self._offloaded:
            yield start, storage, num_bytes
            start += num_bytes


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
