"""The frozen initial weights of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """A copy in host memory of what a rank trains, exchanged with the model's while the reference is read.

    With adapters it is a copy of the adapters alone.

    Args:
        parts: this rank's part of every tensor that trains, the same ones at each call; first called before the first
            step.
    """

    def __init__(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        self._parts = parts
        self._copies = [_host_copy(part.detach()) for part in parts()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the initial weights inside, and bit for bit its own again outside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part, copy in zip(self._parts(), self._copies, strict=True):
            current = part.clone()
            part.copy_(copy)
            copy.copy_(current)


def _host_copy(part: Tensor) -> Tensor:
    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return copy.copy_(part)
