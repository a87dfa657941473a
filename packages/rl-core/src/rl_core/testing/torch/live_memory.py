"""The memory that a computation takes, seen by the tensors that it makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that operations make and that are still there, on any device; views count once. Memory that
    an operation takes for itself is not seen, nor is what was there before.

    The usage loop::

        with LiveMemory() as memory:
            loss(...).backward()
        assert memory.peak < bound

    Attributes:
        peak: Maximum number of bytes at one time.
        largest: Bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and not made.is_meta and _key(made) not in given | self._live.keys():
                storage = made.untyped_storage()
                self._live[_key(made)] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives."""
    return tensor.untyped_storage()._cdata
