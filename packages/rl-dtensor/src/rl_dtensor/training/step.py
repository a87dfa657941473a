"""Passes of a sharded model over this rank's microbatches, and the step on their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedConfig

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.model_config import OptimizerConfig
from rl_core.torch.optim.optimizer import build_optimizer, with_fused_step
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_core.torch.training.flops import ModelShape
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.training.gradients import average_replicated, sum_tied
from rl_dtensor.training.pipeline import run_pipeline
from rl_dtensor.training.state import Sharded


class DTensorModel:
    """The `rl_core.torch.training.backend.RankModel` of a sharded model.

    Args:
        sharded: This rank's part.
        keeps_whole_gradients: True to add up whole gradients of the microbatches on each rank.
    """

    def __init__(self, sharded: ShardedModel, mesh: Mesh, *, keeps_whole_gradients: bool = False) -> None:
        self.sharded = sharded
        self._mesh = mesh
        self._accumulations = [
            Accumulation(cast("FSDPModule", chunk), keeps_whole=keeps_whole_gradients) for chunk in sharded.chunks
        ]

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline ranks, and the stages of each."""
        return Pipeline(self._mesh.sizes.pp, len(self.sharded.chunks))

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.sharded.shape

    @property
    def hf_config(self) -> PreTrainedConfig:
        """Config of the whole model."""
        return self.sharded.hf.config

    @property
    def architecture(self) -> str:
        """Name of the class that the layers are built from."""
        return type(self.sharded.hf).__name__

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
            results = run_pipeline(self.sharded, run, mesh=self._mesh)
        self.sharded.reshard_all()
        return results

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Run forward and backward passes through all stages; FSDP gives each rank its part of the gradient."""

        def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
            return (
                cast("Tensor", run.on_reads(microbatch, columns)) * self._mesh.num_gradients
            )  # FSDP averages over them.

        self.sharded.train(True, compares=run.compares)
        try:
            run_pipeline(self.sharded, replace(run, on_reads=share), mesh=self._mesh, accumulations=self._accumulations)
        finally:
            for accumulation in self._accumulations:
                accumulation.abandon()
        average_replicated(self.sharded, self._mesh)
        sum_tied(self.sharded, self._mesh)
        return {}

    def discard(self) -> None:
        """Do nothing: a backward pass changes only gradients."""

    def trained_parts(self) -> list[Tensor]:
        """Return this rank's shards."""
        return self.sharded.trained_parts()

    def close(self) -> None:
        """Do nothing: garbage collection finds all of the model."""


class ShardedOptimizer:
    """The `rl_core.torch.training.backend.RankOptimizer` over the parameters of a sharded model or draft head.

    Args:
        inner: Steps this rank's shards.
        model: Has the gradients.
        norm: Function to the norm of all of them; collective.
    """

    def __init__(self, inner: Optimizer, model: Sharded, norm: Callable[[], float]) -> None:
        self.inner = inner
        self._model = model
        self._norm = norm

    def grad_norm(self) -> float:
        """Return the norm of the whole gradient; collective."""
        return self._norm()

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's shards of the gradient."""
        grads = [local(parameter.grad) for parameter in self._model.trained() if parameter.grad is not None]
        torch._foreach_mul_(grads, factor)

    def step(self) -> None:
        """Step this rank's shards; other ranks get them when FSDP gathers them."""
        self.inner.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)


def build_sharded_optimizer(
    config: OptimizerConfig, groups: Sequence[Sequence[nn.Parameter]], undecayed: Set[nn.Parameter] = frozenset()
) -> Optimizer:
    """Build an optimizer as `build_optimizer` does, for parameters whose first group are DTensors. The step is fused if
    the optimizer has a fused step for them and the config does not choose.

    Args:
        config: Name and arguments of the optimizer.
        groups: Parameters that the optimizer steps together.
        undecayed: Parameters that are not decayed if `decay_norms_and_biases` is false.

    Raises:
        ValueError: Also if the optimizer's fused step has no implementation for them.
    """
    config = with_fused_step(config, groups[0])
    optimizer = build_optimizer(config, *groups, undecayed=undecayed)
    if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass.
        raise ValueError(
            f"optimizer: the fused step of {config.name} does not run on sharded parameters; leave fused out of "
            "optimizer.kwargs, or use torch.optim.AdamW"
        )
    return optimizer
