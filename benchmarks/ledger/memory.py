"""Memory of tensors that are alive, by their storages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class LiveBytes:
    """Bytes of storages that are still there; views count once, and tensors without data as if they had it.

    Attributes:
        peak: Maximum number of bytes at one time.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._total = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """Number of bytes now."""
        self._recount()
        return self._total

    def add(self, made: Iterable[Tensor], given: Iterable[Tensor] = ()) -> None:
        """Count the storages of tensors that an operation made.

        Args:
            made: Results of the operation.
            given: Its arguments, whose storages are not counted, as they were there before.
        """
        known = set()
        for tensor in given:
            key = storage_key(tensor)
            known.add(key)
            if key in self._live:
                self._keep(key, tensor)
        for tensor in made:
            key = storage_key(tensor)
            if key not in known:
                self._keep(key, tensor)
        # storages are freed and made smaller unseen, so the total is an upper bound
        if self._total > self.peak:
            self._recount()
            self.peak = max(self.peak, self._total)

    def _keep(self, key: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference, size = self._live.get(key, (None, 0))
        if reference is None or storage.nbytes() != size:
            self._live[key] = reference or StorageWeakRef(storage), storage.nbytes()
            self._total += storage.nbytes() - size

    def _recount(self) -> None:
        live: dict[int, tuple[StorageWeakRef, int]] = {}
        for key, (reference, _) in self._live.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                live[key] = reference, storage.nbytes()
        self._live = live
        self._total = sum(size for _, size in live.values())


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives."""
    return tensor.untyped_storage()._cdata
