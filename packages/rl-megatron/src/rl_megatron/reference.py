"""The frozen initial weights of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_megatron.weights import Weights


class Reference:
    """A copy of this rank's weights in host memory, exchanged with the model's while the reference is read.

    With adapters it is a copy of the adapters alone.

    Args:
        weights: as loaded, before the first step.
    """

    def __init__(self, weights: Weights) -> None:
        self._held = list(weights.kept.values())
        self._copies = [_host_copy(tensor.detach()) for tensor in self._held]

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
        for tensor, copy in zip(self._held, self._copies, strict=True):
            current = tensor.clone()
            tensor.copy_(copy)
            copy.copy_(current)


def _host_copy(part: Tensor) -> Tensor:
    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    return copy.copy_(part)
