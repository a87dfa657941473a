"""Collectives that gradients flow through, and modules that compute on this rank's part of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

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


Parameters = Mapping[str, Tensor | None]
"""A module's own parameters by name."""


def localize(
    module: nn.Module, placements: Mapping[str, Placement], grad_scale: float = 1.0, reader: nn.Module | None = None
) -> None:
    """Make a module compute on the local parts of its own DTensor parameters.

    Args:
        module: Module with DTensor parameters, changed in place.
        placements: Parameter name to the placement of the gradient that its computation gives.
        grad_scale: Multiplies gradients.
        reader: The module around it that may read its parameters without calling it.
    """

    def local_parts(held: Parameters) -> Parameters:
        parts = {name: each for name, each in held.items() if each is not None}
        return {**held, **{name: to_local(each, placements[name], grad_scale) for name, each in parts.items()}}

    compute_on(module, local_parts, reader)


def compute_on(
    module: nn.Module, replaced: Callable[[Parameters], Parameters], reader: nn.Module | None = None
) -> None:
    """Make a module compute on other tensors in place of its own parameters.

    Args:
        module: Module whose parameters are replaced during the pass.
        replaced: Function from the parameters to these tensors; called in each forward pass.
        reader: The module in whose forward pass they are in their place; the module itself if None.
    """
    reader = reader or module
    original = reader.forward

    @wraps(original)  # The signature shows how experts are called.
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = module.__dict__["_parameters"]
        module.__dict__["_parameters"] = replaced(held)
        try:
            return original(*args, **kwargs)
        finally:
            module.__dict__["_parameters"] = held

    reader.forward = forward


def to_local(parameter: Tensor, grad: Placement, grad_scale: float = 1.0) -> Tensor:
    """Return this rank's part of a parameter, with gradients."""
    part = parameter.to_local(grad_placements=[grad]) if isinstance(parameter, DTensor) else parameter
    return part if grad_scale == 1.0 else scale_grad(part, grad_scale)


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter on `meta` by a DTensor."""
    parameter = module._parameters[name]
    assert parameter is not None
    split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
