"""Passes of a sharded model over this rank's microbatches, and the step on their gradients over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import add_grads, build_optimizer, take_grads, with_fused_step
from rl_core.torch.optim.parameters import OptimizedParameter
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_core.torch.training.memory import StepPlan
from rl_core.torch.training.step import SHARED_TOKENS
from rl_dtensor.model.layers.recompute import checkpoint_activations
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.training.pipeline import run_pipeline


class DTensorModel:
    """The `rl_core.torch.training.backend.RankModel` of a sharded model.

    Args:
        sharded: This rank's part.
        keeps_whole_gradients: True to add up whole gradients of the microbatches on each rank.

    Attributes:
        pipeline: Pipeline ranks, and the stages of each.
        shape: Shape of the whole model.
        hf_config: Config of the whole model.
        architecture: Name of the class of the layers.
    """

    def __init__(self, sharded: ShardedModel, mesh: DTensorMesh, *, keeps_whole_gradients: bool = False) -> None:
        self.sharded = sharded
        self.trained_parts = sharded.trained_parts
        self.pipeline = Pipeline(mesh.sizes.pp, len(sharded.chunks))
        self.shape = sharded.shape
        self.hf_config: PreTrainedConfig = sharded.hf.config
        self.architecture = type(sharded.hf).__name__
        self._mesh, self._keeps_whole = mesh, keeps_whole_gradients
        self._accumulations = [
            Accumulation(cast("FSDPModule", chunk), keeps_whole=keeps_whole_gradients) for chunk in sharded.chunks
        ]

    def keep_gathered(self) -> None:
        """Gather parameters once in each step or reading pass from now on, rather than in every pass of a layer."""
        for accumulation in self._accumulations:
            accumulation.keep_gathered()

    def plan_step(self, room: int) -> StepPlan:
        """Put the choices into effect that depend on memory; see `rl_core.torch.training.memory.planned_step`.

        Args:
            room: Bytes that a training step may take.
        """
        memory, chunks = self.sharded.memory, self.sharded.chunks
        assert memory is not None, "a model that trains on a device with memory has counted it"
        recompute, keeps_gathered, plan = memory.plan(room, keeps_whole=self._keeps_whole)
        if memory.backend.recompute == "auto":
            for chunk in chunks:
                checkpoint_activations(chunk.hf, decoder_layers(chunk.hf), recompute.of_chunks(len(chunks)))
        if keeps_gathered:
            self.keep_gathered()
        return plan

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Return the experts that tokens were sent to, if routing is replayed."""
        replay = self.sharded.chunks[0].replay
        return {} if replay is None else replay.columns_of(batch, for_loss=for_loss)

    def image_columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return pixels of the images of rows, and the columns that replace their tokens; rows with images are refused
        if the model sees none."""
        vision = self.sharded.chunks[0].vision
        return no_images(batch) if vision is None else vision.columns(batch)

    def read(self, run: Pass) -> list[Any]:
        """Run forward passes through all stages."""
        self.sharded.train(False)
        with torch.no_grad():
            results = run_pipeline(self.sharded, run, mesh=self._mesh).of_reads
        self.sharded.reshard_all()
        return results

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Run forward and backward passes through all stages; FSDP gives each rank its part of the gradient."""

        def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
            # FSDP averages over all gradients.
            return cast("Tensor", run.on_reads(microbatch, columns)) * self._mesh.num_gradients

        self.sharded.train(True, compares=run.compares)
        try:
            passed = run_pipeline(
                self.sharded, replace(run, on_reads=share), mesh=self._mesh, accumulations=self._accumulations
            )
        except BaseException:
            for accumulation in self._accumulations:
                accumulation.abandon()
            raise
        self.sharded.reshard_all()  # A stage without parameters that train has no backward pass, which would do it.
        average_replicated(self.sharded, self._mesh)
        sum_tied(self.sharded, self._mesh)
        if not self.sharded.shares_prefixes:
            return {}
        return {SHARED_TOKENS: Metric(float(passed.num_shared), float(run.num_tokens))}

    def discard(self) -> None:
        """Do nothing: a backward pass changes only gradients."""

    def close(self) -> None:
        """Do nothing: garbage collection finds all of the model."""


class DTensorOptimizer:
    """The `rl_core.torch.training.backend.RankOptimizer` over the parameters of a sharded model or draft head.

    Args:
        inner: Steps this rank's shards of the parameters that it has.
        norm: Function from these to the norm of their gradients; collective.
    """

    def __init__(self, inner: Optimizer, norm: Callable[[Sequence[nn.Parameter]], float]) -> None:
        self.inner, self._norm = inner, norm

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def grad_norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank; collective."""
        return self._norm(self._parameters)

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's shards of the gradient."""
        grads = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if grads:  # All parameters of a pipeline stage may be frozen.
            torch._foreach_mul_(grads, factor)

    def step(self) -> None:
        """Step this rank's shards; other ranks get them when FSDP gathers them."""
        self.inner.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def take_grads(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's shards of the gradient by parameter, and free them."""
        return take_grads(self._parameters)

    def add_grads(self, taken: dict[nn.Parameter, Tensor]) -> None:
        """Add shards that were taken."""
        add_grads(taken)


def build_sharded_optimizer(
    config: OptimizerConfig,
    groups: Sequence[Sequence[nn.Parameter]],
    described: Mapping[nn.Parameter, OptimizedParameter] | None = None,
) -> Optimizer:
    """Build an optimizer as `build_optimizer` does, for parameters whose first group are DTensors. The step is fused if
    the optimizer has a fused step for them and the config does not choose.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together.
        described: Descriptions of the parameters; see `build_optimizer`.

    Raises:
        ValueError: Also if the optimizer's fused step has no implementation for them.
    """
    config = with_fused_step(config, groups[0])
    optimizer = build_optimizer(config, *groups, described=described)
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass.
        raise ValueError(
            f"optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer


def grad_norm(model: ShardedModel, mesh: DTensorMesh, parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of a gradient, the same on every rank; collective.

    Gradients that several ranks hold alike are divided by their number. A tied head counts on the rank of the
    embedding.

    Args:
        model: The model.
        mesh: Its mesh.
        parameters: Parameters whose gradients count.
    """
    replicated = {id(parameter) for parameter in model.replicated or ()}
    tied: Tensor | None = None
    if model.num_stages > 1 and model.weights.catalog.tied and model.chunks[-1].is_last:
        head = model.hf.get_output_embeddings()
        tied = head.weight if isinstance(head, nn.Linear) else None
    grads = [
        (each.grad, mesh.num_gradients if id(each) in replicated else 1)
        for each in parameters
        if each.grad is not None and each is not tied
    ]
    return norm_of(grads, mesh)


def norm_of(grads: Iterable[tuple[Tensor, int]], mesh: DTensorMesh) -> float:
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


def sum_tied(model: ShardedModel, mesh: DTensorMesh) -> None:
    """Add up the gradients of an embedding and of the tied head that another pipeline rank has; collective."""
    shared = set(model.weights.catalog.tied.values())
    if mesh.sizes.pp == 1 or not shared:
        return
    for name in sorted(shared):
        parameter = model.state().get(name)
        if parameter is None or not parameter.requires_grad:  # Neither the first nor the last stage has it here.
            continue
        if model.stages_here[0] == 0 or model.stages_here[-1] == model.num_stages - 1:
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad), group=mesh.ends)


@torch.no_grad()
def average_replicated(model: ShardedModel, mesh: DTensorMesh) -> None:
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
