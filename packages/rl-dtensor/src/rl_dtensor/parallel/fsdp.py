"""FSDP2 sharding of a model, and the parts of its tensors on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_dtensor.parallel.body import body_of, is_composite
from rl_dtensor.parallel.experts import STACK_DIMS, expert_modules
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.parallel.stages import Stages

LAYERS_AHEAD = 2
"""Number of layers that are gathered ahead in a mixture of experts. Its host waits for the sizes of exchanges in every
layer, so that a gather which starts when the host reaches its layer starts too late."""

UNIT_BYTES = 256 * 2**20
"""Maximum size of the gathered parameters of several layers that are one unit. Hooks and collectives of a unit cost the
host as much for small layers as for large ones, and exchanges of this size already reach the speed of the links."""

MIN_UNITS = 4
"""Minimum number of units of the layers, so that the exchanges of one run while others compute."""


class Units(NamedTuple):
    """Modules whose parameters are gathered, and whose gradients are reduced, in one collective each. The rest of the
    root is another unit.

    Args:
        layers: Repeated layers, in order. Several small ones share a unit.
        experts: Modules of experts that are split over expert-parallel ranks, by the place of their layer; they are
            sharded over the other ranks.
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
    mesh: DTensorMesh,
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
        compute: Compute dtype of the model.
        cpu_offload: True to keep parameters, gradients and optimizer state in host memory.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.kind.pins_host_memory) if cpu_offload else OffloadPolicy()
    # Inputs of a layer in addition to hidden states may be float32 on purpose, such as rotary embeddings.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

    def shard(unit: nn.Module | list[nn.Module], over: DeviceMesh = mesh.sharding, **options: Any) -> None:
        def place(parameter: Tensor) -> Shard | None:
            return _shard_of_stack(parameter, over.shape[-1]) if parameter in units.stacks else None

        ignored = set(replicated)
        options = {"mp_policy": policy, "offload_policy": offload, **options}
        fully_shard(unit, mesh=over, ignored_params=ignored, shard_placement_fn=place, **options)

    for head in units.wide:
        shard(head, mp_policy=in_float32)
    for module in [module for modules in units.experts.values() for module in modules]:
        shard(module, over=mesh.expert_sharding)
    for layer in units.tower:
        shard(layer)
    largest = max(sum(local(each).numel() for each in layer.parameters()) for layer in units.layers)
    size = 1 if units.stacks else layers_of_unit(len(units.layers), largest * compute.itemsize)
    for first in range(0, len(units.layers), size):
        run = list(units.layers[first : first + size])
        shard(run if size > 1 else run[0])
    if units.embedding is not None:
        shard(units.embedding)
        # The gradient of a look-up does not depend on the table.
        cast("FSDPModule", units.embedding).set_unshard_in_backward(False)
    if units.end:
        # The backward pass needs them first, right after the forward pass needed them last.
        shard(list(units.end), reshard_after_forward=False)
    shard(root)
    if units.stacks:
        # Each layer starts the gathers of the layers that follow it, in both directions.
        own = [[layer, *units.experts.get(place, ())] for place, layer in enumerate(units.layers)]
        for place, layer in enumerate(units.layers):
            after = own[place + 1 : place + 1 + LAYERS_AHEAD]
            before = own[max(0, place - LAYERS_AHEAD) : place][::-1]
            end = units.end[:1] if place + LAYERS_AHEAD >= len(own) else ()
            sharded, experts = cast("FSDPModule", layer), own[place][1:]
            ahead = [*experts, *chain.from_iterable(after), *end]
            sharded.set_modules_to_forward_prefetch([cast("FSDPModule", each) for each in ahead])
            behind = [*experts, *chain.from_iterable(before)]
            sharded.set_modules_to_backward_prefetch([cast("FSDPModule", each) for each in behind])
    for module in (units.embedding if units.embedding is not None else units.layers[0], *units.tower[:1]):
        first = cast("FSDPModule", module)
        if not first._get_fsdp_state()._states_to_backward_prefetch:
            # Nothing comes before it, or a tower that may be frozen. By default it would gather the last units of the
            # microbatch before it.
            first.set_modules_to_backward_prefetch([first])


def layers_of_unit(num_layers: int, num_bytes: int) -> int:
    """Return the number of consecutive layers without experts that are one unit: one, unless layers are small.

    Args:
        num_layers: Number of layers of a stage.
        num_bytes: Bytes of the gathered parameters of the largest layer.
    """
    most = max(1, min(UNIT_BYTES // max(1, num_bytes), num_layers // MIN_UNITS))
    return -(-num_layers // -(-num_layers // most))


def shard_whole(root: nn.Module, *, mesh: DTensorMesh, compute: torch.dtype) -> None:
    """Shard a small module as one unit, whose parameters stay on the device; otherwise as `shard_model`."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(root, mesh=mesh.sharding, mp_policy=policy)


def _shard_of_stack(parameter: Tensor, num_ranks: int) -> Shard:
    """Return the dim along which stacked weights of experts are sharded.

    It is the dim of the experts if every rank gets as many, which copies least. Otherwise it is the largest dim that
    the ranks divide, so that all of them hold something.
    """
    shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    even = [dim for dim, extent in enumerate(shape) if extent % num_ranks == 0]
    if 0 in even or not even:
        return Shard(0)
    return Shard(max(even, key=lambda dim: shape[dim]))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, sharing memory with it."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # It then returns its part, and is not dispatched as an operation.
            tensor = tensor.to_local()
    return tensor.detach()


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, extent) for extent in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor in a dtype, cast before it is gathered; collective over the ranks that share it.

    A part that is kept in host memory is brought to the device first: gathered there, it takes NCCL and not gloo.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype)
    mesh = tensor.device_mesh
    with torch.no_grad():
        # Every operation on the DTensor itself would be dispatched in Python.
        part = tensor.to_local().to(dtype).to(mesh.device_type)
    if mesh.size() == 1:
        return part
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride).full_tensor()


def ends_of(hf: PreTrainedModel) -> tuple[str, str] | None:
    """Return the embedding and the final norm of a whole model, by name; None if it is more than these and its
    layers."""
    try:
        stages = Stages.of(hf, 1)
    except ValueError:
        return None
    return stages.embedding, stages.final_norm


def units_of(
    hf: PreTrainedModel,
    ends: tuple[str, str] | None,
    *,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    wide: Sequence[nn.Module],
) -> Units:
    """Return the units of a model, or of the part of it on a pipeline stage.

    Embedding and head are units apart from the root, so that a forward pass starts without the head, and the head's
    gradient is reduced while the layers' is computed. If they share a weight they stay in the root.

    Args:
        hf: Model, not yet sharded.
        ends: Names of its embedding and final norm; None if they are unknown, and stay in the root.
        layers: Its repeated layers.
        experts: Its modules of experts that are split over expert-parallel ranks.
        wide: Heads that compute in float32.
    """
    embedding, end = None, []
    if ends is not None:
        uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
        table, norm = (hf.get_submodule(name) for name in ends)
        head = hf.get_output_embeddings()
        if isinstance(table, nn.Embedding) and _is_apart(table, uses):
            embedding = table
        if isinstance(head, nn.Module) and head not in wide and _is_apart(head, uses):
            end = [module for module in (norm, head) if _is_apart(module, uses)]
    within = [{id(module) for module in layer.modules()} for layer in layers]
    inside = [[module for module in experts if id(module) in held] for held in within]
    return Units(
        layers,
        {place: found for place, found in enumerate(inside) if found},
        {
            parameter
            for module in expert_modules(hf)
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == STACK_DIMS
        },
        embedding,
        end,
        wide,
        list(vision_layers(hf, body_of(hf))) if is_composite(hf) else (),
    )


def _is_apart(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether a module has parameters, and shares none of them."""
    own = [uses[id(parameter)] for parameter in module.parameters()]
    return bool(own) and max(own) == 1


def vision_layers(module: nn.Module, language: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated layers of the vision tower, outside of the language model."""
    for child in module.children():
        if child is language:
            continue
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from vision_layers(child, language)
