"""Gradients over all ranks: their norm, and those that FSDP does not bring together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh


def grad_norm(model: ShardedModel, mesh: Mesh) -> float:
    """Return the norm of the whole gradient, the same on every rank; collective.

    Gradients that several ranks hold alike are divided by their number. A tied head counts on the rank of the
    embedding.
    """
    replicated = {id(parameter) for parameter in model.replicated or ()}
    tied: Tensor | None = None
    if model.num_stages > 1 and model.weights.catalog.tied and model.chunks[-1].is_last:
        head = model.hf.get_output_embeddings()
        tied = head.weight if isinstance(head, nn.Linear) else None
    grads = [
        (each.grad, mesh.num_gradients if id(each) in replicated else 1)
        for each in model.trained()
        if each.grad is not None and each is not tied
    ]
    return norm_of(grads, mesh)


def norm_of(grads: Iterable[tuple[Tensor, int]], mesh: Mesh) -> float:
    """Return the norm of gradients together, the same on every rank; collective.

    Args:
        grads: This rank's parts, and the number of ranks that hold each alike, in addition to its placement.
        mesh: Mesh of the ranks.
    """
    squares: dict[tuple[int, torch.device], list[Tensor]] = {}
    for whole, alike in grads:
        grad, copies = local(whole), alike
        if isinstance(whole, DTensor):
            for size, placement in zip(whole.device_mesh.shape, whole.placements, strict=True):
                copies *= size if placement.is_replicate() else 1
        squares.setdefault((copies, grad.device), []).append(grad)
    total = torch.zeros((), device=mesh.device)
    for (copies, _), shards in squares.items():
        norms = torch._foreach_norm(shards)
        total += torch.stack([norm.float() for norm in norms]).to(mesh.device).square().sum() / copies
    dist.all_reduce(total)
    squared = total.item()
    return math.sqrt(squared) if squared >= 0 else math.nan


def sum_tied(model: ShardedModel, mesh: Mesh) -> None:
    """Add up the gradients of an embedding and of the tied head that another pipeline rank has; collective."""
    shared = set(model.weights.catalog.tied.values())
    if mesh.sizes.pp == 1 or not shared:
        return
    for name in sorted(shared):
        parameter = model.state().get(name)
        if parameter is None:  # It is frozen, or neither the first nor the last stage has it here.
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
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            grad = grad.redistribute(placements=parameter.placements)
        grads.append(grad)
    is_there = [torch.full((1,), float(grad is not None), device=mesh.device) for grad in grads]
    parts = [
        torch.zeros_like(local(parameter)) if grad is None else local(grad)
        for parameter, grad in zip(parameters, grads, strict=True)
    ]
    flat = torch.cat([part.flatten().float() for part in (*is_there, *parts)])
    for axis in range(mesh.sharding.ndim):
        dist.all_reduce(flat, group=mesh.sharding.get_group(axis))
    present, *averaged = flat.split([len(parameters), *(part.numel() for part in parts)])
    for parameter, count, total in zip(parameters, present.tolist(), averaged, strict=True):
        part = (total / mesh.num_gradients).view_as(local(parameter)) if count else None
        if part is not None and isinstance(parameter, DTensor):
            place, form = (parameter.device_mesh, parameter.placements), (parameter.shape, parameter.stride())
            part = DTensor.from_local(part, *place, run_check=False, shape=form[0], stride=form[1])
        parameter.grad = part
