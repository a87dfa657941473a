"""The frozen initial weights of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_dtensor.model import ShardedModel
from rl_dtensor.parallel.fsdp import local


class Reference:
    """A copy in host memory of what this rank trains, exchanged with the model's while the reference is read.

    With adapters it is a copy of the adapters alone.

    Args:
        model: as loaded, before its first step.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._copies = [_host_copy(part) for part in self._parts()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the initial weights inside, and bit for bit its own again outside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        self._model.reshard_all()
        with torch.no_grad():
            for part, copy in zip(self._parts(), self._copies, strict=True):
                current = part.clone()
                part.copy_(copy)
                copy.copy_(current)

    def _parts(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._model.trained()]


def _host_copy(part: Tensor) -> Tensor:
    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return copy.copy_(part)
