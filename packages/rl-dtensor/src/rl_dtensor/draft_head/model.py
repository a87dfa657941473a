"""Passes of a draft head over this rank's microbatches, its optimizer and its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_core.data.batch import Batch
from rl_core.data.pipeline import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.rollouts.group import LOSS_MASK
from rl_core.torch.loss import Rows
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_dtensor.draft_head.head import Head
from rl_dtensor.draft_head.policy_states import PolicyReader
from rl_dtensor.model.layout import Alignment, lay_out
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.training.gradients import norm_of
from rl_dtensor.training.step import DTensorModel


class ShardedHead:
    """This rank's part of a head.

    Args:
        module: The head, sharded.
        draft_ids: Int64 `[draft vocabulary]`, the token of each of its outputs; None if they are the policy's.
    """

    def __init__(self, module: Head, draft_ids: Tensor | None) -> None:
        self.module = module
        self.draft_ids = draft_ids

    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        return list(self.module.parameters())

    def trained(self) -> list[nn.Parameter]:
        """Parameters that train: all except an embedding."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint holds, by name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def grad_norm(self, mesh: Mesh) -> float:
        """Norm of the whole gradient, the same on every rank; collective."""
        return norm_of([(each.grad, 1) for each in self.trained() if each.grad is not None], mesh)

    def reshard_all(self) -> None:
        """Free every gathered parameter."""
        cast("FSDPModule", self.module).reshard()


class DraftHeadModel:
    """The `rl_core.torch.training.backend.RankModel` of a head that trains.

    Args:
        head: This rank's part of it.
        policy: The model that it drafts for.
        mesh: Mesh of both.
    """

    def __init__(self, head: ShardedHead, policy: DTensorModel, mesh: Mesh) -> None:
        self._head = head
        self._policy = policy
        self._mesh = mesh
        self._accumulation = Accumulation(cast("FSDPModule", head.module), keeps_whole=False)
        self.shape = None

    @property
    def pipeline(self) -> Pipeline:
        """Return no pipeline."""
        return Pipeline()

    @property
    def hf_config(self) -> Any:
        """Config of the head."""
        return self._head.module.config

    @property
    def architecture(self) -> str:
        """Name of the class that generators serve it with."""
        return str(self.hf_config.architectures[0])

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Columns that the pass of the policy takes."""
        return self._policy.extra_columns(batch, for_loss=False)

    def image_columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """No columns; rows with images are refused."""
        return no_images(batch)

    def read(self, run: Pass) -> list[Any]:
        """Losses of drafts without gradients."""
        with torch.no_grad(), self._reading() as reader:
            return [self._losses(reader, make(), run) for make in run.microbatches]

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """A pass of the policy, then one of the head forward and backward, for each microbatch."""
        last = len(run.microbatches) - 1
        try:
            with self._reading() as reader:
                for number, make in enumerate(run.microbatches):
                    self._accumulation.before_backward(is_last=number == last)
                    share = self._losses(reader, make(), run) * self._mesh.num_gradients  # FSDP averages over them
                    share.backward()
        finally:
            self._accumulation.abandon()
        return {}

    def discard(self) -> None:
        """Do nothing: a backward pass changes only gradients."""

    def trained_parts(self) -> list[Tensor]:
        """This rank's shards."""
        self._head.reshard_all()
        return [local(parameter) for parameter in self._head.trained()]

    def close(self) -> None:
        """Do nothing: garbage collection finds all of the head."""

    @contextmanager
    def _reading(self) -> Iterator[PolicyReader]:
        """Context with a reader of the policy as it is; afterwards nothing is gathered."""
        policy: ShardedModel = self._policy.sharded
        try:
            yield PolicyReader(policy, self._head.module, self._head.draft_ids)
        finally:
            policy.reshard_all()
            self._head.reshard_all()

    def _losses(self, reader: PolicyReader, microbatch: Microbatch, run: Pass) -> Any:
        rows = microbatch.rows
        states = reader.read(rows)
        layout = lay_out(rows, Alignment(), is_packed=True)
        columns: dict[str, Tensor] = {
            read.name: self._head.module(states, layout, _wanted(rows), read.k) for read in run.reads
        }
        return run.on_reads(microbatch, columns)


def _wanted(rows: Rows) -> Tensor:
    """Bool `[tokens]`, the tokens that were sampled; all of a row that only lets the rank join in."""
    if LOSS_MASK in rows:
        return rows[LOSS_MASK] > 0
    return torch.ones(rows.num_tokens, dtype=torch.bool, device=rows.offsets.device)
