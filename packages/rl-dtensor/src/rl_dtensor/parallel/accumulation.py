"""Gradients of several microbatches, added up before or after they are brought together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_core.model_size import MOMENTS
from rl_dtensor.config import GradientAccumulation
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh

_log = logging.getLogger(__name__)

SHARE = 0.5
"""Largest share of a device's memory that parameters, optimizer state and whole gradients may take if the choice is
left to this backend; activations, gathered layers and logits need the rest."""


class Accumulation:
    """Brings the gradients of a sharded module together: those of every microbatch, or the sum of all.

    With HSDP, gradients that are brought together in every microbatch are so within a replica only; replicas add up
    theirs after the last.

    Args:
        root: Module whose forward pass is a stage's.
        keeps_whole: True to add up whole gradients of the microbatches on each rank.
    """

    def __init__(self, root: FSDPModule, *, keeps_whole: bool) -> None:
        self._root = root
        self._keeps_whole = keeps_whole
        self._is_last = True

    def before_backward(self, *, is_last: bool) -> None:
        """To be called before each backward pass.

        Args:
            is_last: True if no other backward pass follows before the step.
        """
        if is_last == self._is_last:
            return
        self._is_last = is_last
        self._root.set_is_last_backward(is_last)
        if self._keeps_whole:
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)

    def abandon(self) -> None:
        """Forget what is added up, after a pass that failed; the next one would continue with it."""
        if self._is_last:
            return
        self._root.reset_iter_state()
        for parameter in _managed(self._root):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        self.before_backward(is_last=True)


def _managed(root: FSDPModule) -> Iterator[Any]:
    """FSDP's own record of each parameter; it has no public way to drop a gradient that is not yet reduced."""
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


@dataclass(frozen=True)
class GradientMemory:
    """Bytes on a device that the choice of an accumulation depends on.

    Args:
        state: This rank's part of parameters, gradients and optimizer state.
        whole: Whole float32 gradients of the parameters that train.
    """

    state: int
    whole: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], *, cpu_offload: bool) -> GradientMemory:
        """Count a rank's parameters.

        Args:
            parameters: Parameters of the rank, sharded.
            cpu_offload: True if parameters and state are in host memory.
        """
        state = whole = 0
        for parameter in parameters:
            part = local(parameter)
            state += part.numel() * part.element_size()
            if parameter.requires_grad:
                state += part.numel() * torch.float32.itemsize * (1 + MOMENTS)
                whole += parameter.numel() // _split_by_others(parameter) * torch.float32.itemsize
        return cls(0 if cpu_offload else state, whole)

    def fits(self, capacity: int) -> bool:
        """Return whether whole gradients fit next to the rest on a device of this many bytes."""
        return self.state + self.whole <= SHARE * capacity


def _split_by_others(parameter: nn.Parameter) -> int:
    """Number of parts that a parameter is split into by tensor and expert parallelism, whose ranks compute on them."""
    if not isinstance(parameter, DTensor):
        return 1
    parts = 1
    names = parameter.device_mesh.mesh_dim_names or ()
    for name, size, placement in zip(names, parameter.device_mesh.shape, parameter.placements, strict=True):
        if name in ("tp", "ep") and placement.is_shard():
            parts *= size
    return parts


def keeps_whole_gradients(choice: GradientAccumulation, memory: GradientMemory, mesh: Mesh) -> bool:
    """Return whether whole gradients of the microbatches are added up, the same on every rank; collective.

    Args:
        choice: `dtensor_cfg.gradient_accumulation`.
        memory: Of this rank.
        mesh: Mesh of the run.
    """
    if choice != "auto":
        return choice == "unsharded"
    capacity = mesh.kind.capacity_bytes
    fits = torch.tensor(float(capacity is not None and memory.fits(capacity)))
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=mesh.control)
    keeps = bool(fits.item()) and mesh.num_gradients > 1
    if capacity is not None and mesh.rank == 0:
        _log.info(
            "gradient_accumulation=auto keeps %s gradients between microbatches: whole ones take %.1f GB next to "
            "%.1f GB of parameters and optimizer state, and may take up to %.0f %% of %.1f GB together on every rank",
            "unsharded" if keeps else "sharded",
            memory.whole / 1e9,
            memory.state / 1e9,
            100 * SHARE,
            capacity / 1e9,
        )
    return keeps
