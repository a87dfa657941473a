"""FSDP2 sharding of a model, and the parts of its tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_dtensor.parallel.mesh import Mesh


def shard_model(
    root: nn.Module,
    layers: Sequence[nn.Module],
    wide: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    *,
    replicated: Set[nn.Parameter] = frozenset(),
    mesh: Mesh,
    compute: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Shard each layer, then what remains in the root, over the mesh.

    Computes in `compute`, reduces gradients in float32; FSDP averages over the ranks, so a step scales its loss by
    their number (its own divide factor is easily set on too few modules, and gloo cannot scale).

    Args:
        root: Whole module to shard, changed in place.
        layers: Layers that are gathered and freed one after another.
        wide: Small heads that compute in float32 whatever the rest does.
        experts: Modules that are split over expert-parallel ranks, and sharded over what ranks those leave.
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

    def shard(modules: Sequence[nn.Module], over: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
        for module in modules:
            fully_shard(module, mesh=over, mp_policy=precision, offload_policy=offload, ignored_params=set(replicated))

    shard(wide, mesh.sharding, in_float32)
    if experts:
        shard(experts, mesh.expert_sharding, policy)
    shard([*layers, root], mesh.sharding, policy)


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
