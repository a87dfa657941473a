"""FSDP2 sharding of a model, and the parts of its tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_dtensor.parallel.mesh import Mesh

LAYERS_AHEAD = 2
"""Number of layers that are gathered ahead in a mixture of experts. Its host waits for the sizes of exchanges in every
layer, so that a gather which starts when the host reaches its layer starts too late."""


@dataclass(frozen=True)
class Units:
    """Modules whose parameters are gathered, and whose gradients are reduced, in one collective each. What they leave
    of the root is another unit.

    Args:
        layers: Repeated layers, in order.
        experts: Modules of experts that are split over expert-parallel ranks, by the place of their layer; they are
            sharded over the ranks that this leaves.
        stacks: Stacked parameters of experts, whether split or not.
        embedding: The embedding, unless it shares its weight with the head.
        end: Final norm and head, which a pass reads last; empty if they share parameters with others.
        wide: Small heads that compute in float32 whatever the rest does.
        tower: Repeated layers of a vision tower, in order.
    """

    layers: Sequence[nn.Module]
    experts: Mapping[int, Sequence[nn.Module]]
    stacks: Set[nn.Parameter]
    embedding: nn.Module | None
    end: Sequence[nn.Module]
    wide: Sequence[nn.Module]
    tower: Sequence[nn.Module] = ()


def shard_model(
    root: nn.Module,
    units: Units,
    *,
    replicated: Set[nn.Parameter] = frozenset(),
    mesh: Mesh,
    compute: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Shard each unit, then what remains in the root, over the mesh.

    Computes in `compute`, reduces gradients in float32; FSDP averages over the ranks, so a step scales its loss by
    their number (its own divide factor is easily set on too few modules, and gloo cannot scale).

    Args:
        root: Whole module to shard, changed in place.
        units: Its parts.
        replicated: Parameters that every rank keeps whole in their own dtype; their gradients are left to
            `average_replicated`.
        mesh: Mesh of the run.
        compute: Dtype in which the model computes.
        cpu_offload: True to keep parameters, gradients and optimizer state in host memory.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.kind.pins_host_memory) if cpu_offload else OffloadPolicy()
    # what a layer is told besides hidden states may be float32 on purpose, such as rotary embeddings
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

    def shard(
        unit: nn.Module | list[nn.Module],
        *,
        over: DeviceMesh = mesh.sharding,
        precision: MixedPrecisionPolicy = policy,
        frees_after_forward: bool | None = None,
    ) -> None:
        fully_shard(
            unit,
            mesh=over,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=set(replicated),
            reshard_after_forward=frees_after_forward,
            shard_placement_fn=lambda parameter: (
                shard_of_stack(parameter, over.shape[-1]) if parameter in units.stacks else None
            ),
        )

    for head in units.wide:
        shard(head, precision=in_float32)
    for module in [module for modules in units.experts.values() for module in modules]:
        shard(module, over=mesh.expert_sharding)
    for layer in (*units.tower, *units.layers):
        shard(layer)
    if units.embedding is not None:
        shard(units.embedding)
        # the gradient of a look-up does not depend on the table
        cast("FSDPModule", units.embedding).set_unshard_in_backward(False)
    if units.end:
        # what a forward pass needs last, the backward pass needs first
        shard(list(units.end), frees_after_forward=False)
    shard(root)
    if units.stacks:
        _gather_ahead(units)
    for module in (units.embedding if units.embedding is not None else units.layers[0], *units.tower[:1]):
        first = cast("FSDPModule", module)
        if not first._get_fsdp_state()._states_to_backward_prefetch:
            # nothing comes before it, or a tower that may be frozen: by default it would gather what the microbatch
            # before it ended with
            first.set_modules_to_backward_prefetch([first])


def shard_whole(root: nn.Module, *, mesh: Mesh, compute: torch.dtype) -> None:
    """Shard a small module as one unit, whose parameters stay on the device; otherwise as `shard_model`."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(root, mesh=mesh.sharding, mp_policy=policy)


def shard_of_stack(parameter: Tensor, num_ranks: int) -> Shard:
    """Return the dim along which stacked weights of experts are sharded: that of the experts if every rank gets as
    many, which copies least, otherwise the largest that the ranks divide, so that all of them hold something."""
    shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    even = [dim for dim, extent in enumerate(shape) if extent % num_ranks == 0]
    if 0 in even or not even:
        return Shard(0)
    return Shard(max(even, key=lambda dim: shape[dim]))


def _gather_ahead(units: Units) -> None:
    """Have each layer start the gathers of those that follow it, in both directions."""
    own = [[layer, *units.experts.get(place, ())] for place, layer in enumerate(units.layers)]
    end = [*units.end[:1]]
    for place, layer in enumerate(units.layers):
        after = own[place + 1 : place + 1 + LAYERS_AHEAD]
        before = own[max(0, place - LAYERS_AHEAD) : place][::-1]
        is_near_end = place + LAYERS_AHEAD >= len(own)
        sharded = cast("FSDPModule", layer)
        sharded.set_modules_to_forward_prefetch(_flat([own[place][1:], *after, end if is_near_end else []]))
        sharded.set_modules_to_backward_prefetch(_flat([own[place][1:], *before]))


def _flat(groups: Sequence[Sequence[nn.Module]]) -> list[FSDPModule]:
    return [cast("FSDPModule", module) for group in groups for module in group]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing memory with it."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Slices of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, extent) for extent in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in a dtype, cast before it is gathered; collective over the ranks that share it.

    A part that is kept in host memory is brought to the device first: gathered there, it takes NCCL and not gloo.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype)
    mesh = tensor.device_mesh
    with torch.no_grad():
        # every operation on the DTensor itself would be dispatched in Python
        part = tensor.to_local().to(dtype).to(mesh.device_type)
    if mesh.size() == 1:
        return part
    placed = DTensor.from_local(
        part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed.full_tensor()
