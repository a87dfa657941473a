"""Collectives that gradients flow through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Counts = tuple[int, ...]
"""Number of rows for, or from, each rank of a group."""


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor; its gradient is summed over the group, whose ranks use it for parts of the work."""
    return cast("Tensor", _Enter.apply(x, group))


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group; each rank's part gets the whole gradient."""
    return cast("Tensor", _Leave.apply(x, group))


def gather(x: Tensor, dim: int, group: dist.ProcessGroup, *, sums_grad: bool = True) -> Tensor:
    """Return all ranks' tensors joined along a dim.

    Args:
        x: Tensor of this rank, of the same shape on all ranks.
        dim: Dim along which tensors are joined, in the order of ranks.
        group: Ranks that take part.
        sums_grad: True if ranks have different gradients, to be summed; otherwise all have the same one.
    """
    return cast("Tensor", _Gather.apply(x, dim, group, sums_grad))


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along a dim of the sum over the group."""
    return cast("Tensor", _ScatterSum.apply(x, dim, group))


def split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along a dim of a tensor that all ranks have; all have its gradient too."""
    return cast("Tensor", _Split.apply(x, dim, group))


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of the group; return the rows for this rank in the order of ranks.

    Args:
        x: `[rows, ...]`, in the order of the ranks that receive them.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: Ranks that take part.
    """
    return cast("Tensor", _Exchange.apply(x, tuple(sent), tuple(received), group))


def start_exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Start an `exchange`, and return the function that waits for its result.

    Work until that call overlaps with the exchange, and the backward pass of the work with the exchange of gradients.
    The function is to be called once.
    """
    trip = _Trip(tuple(sent), tuple(received), group)
    out = _Start.apply(x, trip)
    return lambda: cast("Tensor", _Arrive.apply(out, trip))


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return the same tensor; its gradient is multiplied."""
    return cast("Tensor", _ScaleGrad.apply(x, factor))


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, sums_grad: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.sums_grad = dim, group, sums_grad
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums_grad:
            return _scattered(grad, ctx.dim, ctx.group), None, None, None
        own = grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return own.contiguous(), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


@dataclass
class _Trip:
    """An exchange that has started, forward or back."""

    sent: Counts
    received: Counts
    group: dist.ProcessGroup
    work: Any = None
    arriving: Tensor | None = None

    def start(self, x: Tensor, sent: Counts, received: Counts) -> None:
        out = self.arriving = x.new_empty((sum(received), *x.shape[1:]))
        sizes = (list(received), list(sent))
        self.work = dist.all_to_all_single(out, x.contiguous(), *sizes, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        assert self.arriving is not None
        arrived, self.arriving = self.arriving, None
        self.work.wait()
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.start(x, trip.sent, trip.received)
        assert trip.arriving is not None
        return trip.arriving

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.finish()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        trip.start(grad, trip.received, trip.sent)
        return grad, None  # `_Start` returns the gradient that arrives.


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None
