"""Tensors that leave the device to others for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parked:
    """Storages whose bytes lie in host memory while the tensors on them keep their identity.

    Emptying the storage rather than moving the tensors keeps every alias valid: buffers' views, the optimizer's keys.

    Args:
        tensors: what to park; tensors on one storage are parked once.
        keeps: whether the bytes come back; where not, zeros do.
    """

    def __init__(self, tensors: Iterable[Tensor], *, keeps: bool = True) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for storage in storages.values():
            if storage.nbytes():
                host = None
                if keeps:
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                    host.untyped_storage().copy_(storage)
                self._parked.append((storage, storage.nbytes(), host))
        for storage, _, _ in self._parked:
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the bytes back."""
        for storage, num_bytes, host in self._parked:
            storage.resize_(num_bytes)
            if host is None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(host.untyped_storage())
        self._parked = []
