"""Gradients and gathered parameters of the microbatches of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_core.facts.optimizer_arguments import state_bytes
from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.parameters import OptimizedParameter
from rl_dtensor.config import GradientAccumulation
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import DTensorMesh

_log = logging.getLogger(__name__)

SHARE = 0.5
"""Largest share of a device's memory that parameters, optimizer state and whole gradients may take if the choice is
left to this backend; activations, gathered layers and logits need the rest."""


class Accumulation:
    """Reduces the gradients of a sharded module over the ranks: after every microbatch, or their sum after the last.

    With HSDP, gradients are reduced after every microbatch only within a replica; replicas add up theirs after the
    last.

    Args:
        root: Module whose forward pass is the pass of a stage.
        keeps_whole: True to add up whole gradients of the microbatches on each rank.
    """

    def __init__(self, root: FSDPModule, *, keeps_whole: bool) -> None:
        self._root = root
        self._keeps_whole = keeps_whole
        self._keeps_gathered = False
        self._is_last = True

    def keep_gathered(self) -> None:
        """Keep parameters gathered after passes from now on, except after the backward pass of the last microbatch.

        A pass without backward passes has to reshard them at its end.
        """
        self._keeps_gathered = True
        self._root.set_reshard_after_forward(False)

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare FSDP for a backward pass; to be called before each.

        Args:
            is_last: True if no other backward pass follows before the step.
        """
        if is_last == self._is_last:
            return
        self._is_last = is_last
        self._root.set_is_last_backward(is_last)
        if self._keeps_gathered:
            self._root.set_reshard_after_backward(is_last)
        if self._keeps_whole:
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)

    def abandon(self) -> None:
        """Forget the gradients and gathered parameters of a pass that failed; the next pass would use them."""
        self._root.reset_iter_state()
        # FSDP has no public way to drop a gradient that is not yet reduced.
        units = [each for each in cast("nn.Module", self._root).modules() if isinstance(each, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        self.before_backward(is_last=True)


class GradientMemory(NamedTuple):
    """Bytes on a device that decide the choice of an accumulation.

    Args:
        state: This rank's part of parameters, gradients and optimizer state.
        whole: Whole float32 gradients of the parameters that train.
    """

    state: int
    whole: int

    @classmethod
    def of(
        cls,
        parameters: Iterable[nn.Parameter],
        optimizer: OptimizerConfig,
        described: Mapping[nn.Parameter, OptimizedParameter],
        *,
        cpu_offload: bool,
    ) -> GradientMemory:
        """Count a rank's parameters.

        Args:
            parameters: Parameters of the rank, sharded.
            optimizer: Optimizer that steps them.
            described: Descriptions of the parameters that train.
            cpu_offload: True if parameters and state are in host memory.
        """
        state, whole = 0.0, 0
        each = state_bytes(optimizer.name, optimizer.kwargs)
        for parameter in parameters:
            part = local(parameter)
            state += part.numel() * part.element_size()
            if parameter.requires_grad:
                is_matrix = parameter in described and described[parameter].pieces is not None
                state += part.numel() * (torch.float32.itemsize + (each.matrices if is_matrix else each.others))
                parts = 1  # Tensor and expert parallelism split a parameter, and its ranks compute on the parts.
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, placements, strict=True):
                        parts *= size if name in ("tp", "ep") and placement.is_shard() else 1
                whole += parameter.numel() // parts * torch.float32.itemsize
        return cls(0 if cpu_offload else round(state), whole)

    def fits(self, capacity: int) -> bool:
        """Return whether whole gradients fit next to the rest on a device of this many bytes."""
        return self.state + self.whole <= SHARE * capacity


def keeps_whole_gradients(choice: GradientAccumulation, memory: GradientMemory, mesh: DTensorMesh) -> bool:
    """Return whether whole gradients of the microbatches are added up, the same on every rank; collective.

    Args:
        choice: `dtensor_cfg.gradient_accumulation`.
        memory: Memory of this rank.
        mesh: Mesh of the run.
    """
    if choice != "auto":
        return choice == "unsharded"
    device = mesh.kind.memory()
    fits = torch.tensor(float(device is not None and memory.fits(device.total)))
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=mesh.control)
    keeps = bool(fits.item()) and mesh.num_gradients > 1
    if device is not None and mesh.rank == 0:
        _log.info(
            "gradient_accumulation=auto keeps %s gradients between microbatches: whole ones take %.1f GB next to "
            "%.1f GB of parameters and optimizer state, and may take up to %.0f %% of %.1f GB together on every rank",
            "unsharded" if keeps else "sharded",
            memory.whole / 1e9,
            memory.state / 1e9,
            100 * SHARE,
            device.total / 1e9,
        )
    return keeps
