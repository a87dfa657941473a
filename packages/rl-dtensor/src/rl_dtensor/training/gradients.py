"""Gradients over all ranks: their norm, and those that FSDP does not bring together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh


class Trained(Protocol):
    """What has parameters that train: a `ShardedModel`, or a draft head."""

    def trained(self) -> list[nn.Parameter]:
        """Parameters of this rank that train."""
        ...


def grad_norm(model: ShardedModel, mesh: Mesh) -> float:
    """Norm of the whole gradient, the same on every rank; collective.

    Gradients that several ranks hold alike are divided by their number. A tied head counts on the rank of the
    embedding.
    """
    replicated = {id(parameter) for parameter in model.replicated or ()}
    return norm_of(
        (
            (parameter.grad, mesh.num_gradients if id(parameter) in replicated else 1)
            for parameter in model.trained()
            if parameter.grad is not None and not _is_tied_copy(model, parameter)
        ),
        mesh,
    )


def norm_of(grads: Iterable[tuple[Tensor, int]], mesh: Mesh) -> float:
    """Norm of gradients together, the same on every rank; collective.

    Args:
        grads: This rank's parts, and the number of ranks that hold each alike, in addition to what its placement says.
        mesh: Mesh of the ranks.
    """
    squares: dict[tuple[int, torch.device], list[Tensor]] = {}
    for whole, alike in grads:
        grad = local(whole)
        squares.setdefault((_num_copies(whole) * alike, grad.device), []).append(grad)
    total = torch.zeros((), device=mesh.device)
    for (copies, _), shards in squares.items():
        norms = torch._foreach_norm(shards)
        total += torch.stack([norm.float() for norm in norms]).to(mesh.device).square().sum() / copies
    dist.all_reduce(total)
    squared = total.item()
    return math.sqrt(squared) if squared >= 0 else math.nan


def local_grads(model: Trained) -> list[Tensor]:
    """This rank's part of the gradient of every parameter that has one."""
    return [local(parameter.grad) for parameter in model.trained() if parameter.grad is not None]


def sum_tied(model: ShardedModel, mesh: Mesh) -> None:
    """Add up the gradients of an embedding and of the tied head that another pipeline rank has; collective."""
    shared = set(model.weights.catalog.tied.values())
    if mesh.sizes.pp == 1 or not shared:
        return
    for name in sorted(shared):
        parameter = model.state().get(name)
        if parameter is None:  # frozen, or neither the first nor the last stage
            continue
        if model.stages_here[0] == 0 or model.stages_here[-1] == model.num_stages - 1:
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad), group=mesh.ends)


@torch.no_grad()
def average_replicated(model: ShardedModel, mesh: Mesh) -> None:
    """Average the gradients of the parameters that FSDP does not shard, as it averages the others; collective.

    A parameter without a gradient on every rank is left without one.
    """
    parameters = model.replicated
    if not parameters:
        return
    grads = [_placed_grad(parameter) for parameter in parameters]
    is_there = [torch.full((1,), float(grad is not None), device=mesh.device) for grad in grads]
    parts = [
        torch.zeros_like(local(parameter)) if grad is None else local(grad)
        for parameter, grad in zip(parameters, grads, strict=True)
    ]
    flat = torch.cat([part.flatten().float() for part in (*is_there, *parts)])
    for axis in range(mesh.sharding.ndim):
        dist.all_reduce(flat, group=mesh.sharding.get_group(axis))
    present, *averaged = flat.split([len(parameters), *(part.numel() for part in parts)])
    for parameter, count, mean in zip(parameters, present.tolist(), averaged, strict=True):
        parameter.grad = _like(parameter, mean / mesh.num_gradients) if count else None


def _placed_grad(parameter: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter in the placement of that."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        return grad.redistribute(placements=parameter.placements)
    return grad


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor, shaped and placed as a parameter is."""
    part = part.view_as(local(parameter))
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _is_tied_copy(model: ShardedModel, parameter: nn.Parameter) -> bool:
    """Return whether it is a tied head on another rank than the embedding."""
    if model.num_stages == 1 or not model.weights.catalog.tied or not model.chunks[-1].is_last:
        return False
    head = model.hf.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.weight is parameter


def _num_copies(grad: Tensor) -> int:
    """Ranks that hold the same part of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    copies = 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        if placement.is_replicate():
            copies *= size
    return copies
