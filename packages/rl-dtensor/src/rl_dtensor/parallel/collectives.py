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

Parameters = Mapping[str, Tensor | None]
"""A module's own parameters by name."""


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same tensor; its gradient is summed over the group, whose ranks use it for parts of the work."""
    return _mapped(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group; each rank's part gets the whole gradient."""
    return _mapped(x, lambda x: _summed(x, group), lambda grad: grad)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup, *, sums_grad: bool = True) -> Tensor:
    """Return all ranks' tensors joined along a dim.

    Args:
        x: Tensor of this rank, of the same shape on all ranks.
        dim: Dim along which tensors are joined, in the order of ranks.
        group: Ranks that take part.
        sums_grad: True if ranks have different gradients, to be summed; otherwise all have the same one.
    """
    own_grad = _scattered if sums_grad else _own_part
    return _mapped(x, lambda x: _gathered(x, dim, group), lambda grad: own_grad(grad, dim, group))


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along a dim of the sum over the group."""
    return _mapped(x, lambda x: _scattered(x, dim, group), lambda grad: _gathered(grad, dim, group))


def split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along a dim of a tensor that all ranks have; all have its gradient too."""
    return _mapped(x, lambda x: _own_part(x, dim, group), lambda grad: _gathered(grad, dim, group))


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of the group; return the rows for this rank in the order of ranks.

    Args:
        x: `[rows, ...]`, in the order of the ranks that receive them.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: Ranks that take part.
    """

    def exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
        return out

    return _mapped(x, lambda x: exchanged(x, sent, received), lambda grad: exchanged(grad, received, sent))


def start_exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Start an `exchange`, and return the function that waits for its result.

    Work until that call overlaps with the exchange, and the backward pass of the work with the exchange of gradients.
    The function is to be called once.
    """
    trip = _Trip(group)

    def arrive(x: Tensor) -> Tensor:
        trip.finish()
        return x.view_as(x)

    def send_back(grad: Tensor) -> Tensor:
        trip.start(grad, received, sent)
        return grad  # The backward pass of `out` returns the gradient that arrives.

    out = _mapped(x, lambda x: trip.start(x, sent, received), lambda _: trip.finish())
    return lambda: _mapped(out, arrive, send_back)


@dataclass
class _Trip:
    """An exchange that has started, forward or back."""

    group: dist.ProcessGroup
    work: Any = None
    arriving: Tensor | None = None

    def start(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = self.arriving = x.new_empty((sum(received), *x.shape[1:]))
        sizes = (list(received), list(sent))
        self.work = dist.all_to_all_single(out, x.contiguous(), *sizes, group=self.group, async_op=True)
        return out

    def finish(self) -> Tensor:
        assert self.arriving is not None
        arrived, self.arriving = self.arriving, None
        self.work.wait()
        return arrived


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return the same tensor; its gradient is multiplied."""
    return _mapped(x, lambda x: x.view_as(x), lambda grad: grad * factor)


def _mapped(x: Tensor, map_value: Callable[[Tensor], Tensor], map_grad: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function's result, with another function for the gradient."""
    return cast("Tensor", _Mapped.apply(x, map_value, map_grad))


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, map_value: Callable[[Tensor], Tensor], map_grad: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.map_grad = map_grad
        return map_value(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.map_grad(grad), None, None


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    parts = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous(), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(size), dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_single(own, parts.flatten(0, 1), group=group)
    return own


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


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
