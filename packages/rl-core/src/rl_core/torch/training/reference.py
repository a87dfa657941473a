"""The weights that a policy is compared with: its initial ones, or ones that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.torch.residency.host_slabs import HostSlabs, bytes_of


class Reference:
    """A copy in host memory of the tensors that a rank trains, exchanged with the model's while the reference is read.

    With adapters it is a copy of only the adapters.

    Args:
        parts: This rank's part of every tensor that trains, the same ones at each call; first called before the first
            step.
    """

    def __init__(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        self._parts = parts
        held = list(parts())
        is_pinned = any(part.is_cuda for part in held)
        self._host = HostSlabs(sum(part.nbytes for part in held), is_pinned=is_pinned)
        self._has_moved = False
        for start, part in _placed(held):
            self._host.write(start, bytes_of(part))

    @property
    def has_moved(self) -> bool:
        """Return whether these are no longer the initial weights, so that a checkpoint has to hold them."""
        return self._has_moved

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Move by `share * (weights - reference)`, in float32 or wider and rounded to the dtype of each tensor; a share
        of 1 copies.

        Tensors that are not floating-point numbers are copied.
        """
        for start, part in _placed(self._parts()):
            moved = part.detach()
            if share < 1 and part.is_floating_point():
                held = torch.empty_like(moved)
                self._host.read(start, bytes_of(held))
                wide = torch.promote_types(part.dtype, torch.float32)
                moved = torch.lerp(held.to(wide), moved.to(wide), share).to(part.dtype)
            self._host.write(start, bytes_of(moved))
        self._has_moved = True

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Context that reads the weights of a checkpoint into the model; they become those of the reference, and the
        model has its own again."""
        with self.in_place():
            yield
        self._has_moved = True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the weights of the reference; afterwards it has its own again, bit for bit."""
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
