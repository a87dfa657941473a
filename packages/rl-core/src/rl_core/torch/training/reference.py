"""The frozen initial weights of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.torch.residency.host_slabs import HostSlabs, bytes_of


class Reference:
    """A copy in host memory of the tensors that a rank trains, exchanged with the model's while the reference is read.

    With adapters it is a copy of the adapters alone.

    Args:
        parts: this rank's part of every tensor that trains, the same ones at each call; first called before the first
            step.
    """

    def __init__(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        self._parts = parts
        held = list(parts())
        is_pinned = any(part.is_cuda for part in held)
        self._host = HostSlabs(sum(part.nbytes for part in held), is_pinned=is_pinned)
        for start, part in _placed(held):
            self._host.write(start, bytes_of(part))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the initial weights; afterwards it has its own again, bit for bit."""
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
    """Each part, after the offset of its bytes on the host."""
    start = 0
    for part in parts:
        yield start, part
        start += part.nbytes
