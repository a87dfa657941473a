"""Passes of a draft head over this rank's microbatches, its optimizer and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.model import HIDDEN
from rl_core.rollouts.group import LOSS_MASK
from rl_core.torch.heads import logprobs
from rl_core.torch.heads.reads import join_tokens
from rl_core.torch.loss import Rows
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_dtensor.draft_head.head import Head, PolicyStates
from rl_dtensor.model.layout import Alignment, lay_out
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.fsdp import local, whole
from rl_dtensor.parallel.mesh import DTensorMesh
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
        """Return all parameters."""
        return list(self.module.parameters())

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that train: all except an embedding."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def reshard_all(self) -> None:
        """Free every gathered parameter."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class DraftHeadModel:
    """The `rl_core.torch.training.backend.RankModel` of a head that trains.

    Args:
        head: This rank's part of it.
        policy: The model that it drafts for.
        mesh: Mesh of both.
    """

    def __init__(self, head: ShardedHead, policy: DTensorModel, mesh: DTensorMesh) -> None:
        self._head = head
        self._policy = policy
        self._mesh = mesh
        self.image_columns: Callable[[Batch], Mapping[str, np.ndarray]] = no_images  # Rows with images are refused.
        self._accumulation = Accumulation(cast("FSDPModule", head.module), keeps_whole=False)
        self.shape = None
        self.pipeline = Pipeline()
        self.hf_config: Any = head.module.config

    @property
    def architecture(self) -> str:
        """Name of the class that generators serve it with."""
        return str(self.hf_config.architectures[0])

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Return the columns that the pass of the policy takes."""
        return self._policy.extra_columns(batch, for_loss=False)

    def read(self, run: Pass) -> list[Any]:
        """Return losses of drafts without gradients."""
        with torch.no_grad(), self._reading() as reader:
            return [self._losses(reader, make(), run) for make in run.microbatches]

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Run a pass of the policy, then one of the head forward and backward, for each microbatch."""
        last = len(run.microbatches) - 1
        try:
            with self._reading() as reader:
                for number, make in enumerate(run.microbatches):
                    self._accumulation.before_backward(is_last=number == last)
                    share = self._losses(reader, make(), run) * self._mesh.num_gradients  # FSDP averages over them.
                    share.backward()
        except BaseException:
            self._accumulation.abandon()
            raise
        return {}

    def discard(self) -> None:
        """Do nothing: a backward pass changes only gradients."""

    def trained_parts(self) -> list[Tensor]:
        """Return this rank's shards."""
        self._head.reshard_all()
        return [local(parameter) for parameter in self._head.trained()]

    def close(self) -> None:
        """Do nothing: garbage collection finds all of the head."""

    @contextmanager
    def _reading(self) -> Iterator[PolicyReader]:
        """Enter a context with a reader of the policy as it is; afterwards nothing is gathered."""
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
        if LOSS_MASK in rows:
            wanted = rows[LOSS_MASK] > 0
        else:  # The row only lets the rank take part.
            wanted = torch.ones(rows.num_tokens, dtype=torch.bool, device=rows.offsets.device)
        columns: dict[str, Any] = {read.name: self._head.module(states, layout, wanted, read.k) for read in run.reads}
        return run.on_reads(microbatch, columns)


class PolicyReader:
    """Reads a policy for its head, without gradients and without dropout.

    Its embedding and its output layer are gathered when it is made: make it anew after a step of the policy. Making it
    and reading are collective.

    Args:
        policy: Whole layers of a policy, which no rank shares.
        head: The head.
        draft_ids: Int64 `[draft vocabulary]`, the token of each output of the head; None if they are the same.
    """

    def __init__(self, policy: ShardedModel, head: Head, draft_ids: Tensor | None) -> None:
        (self._chunk,) = policy.chunks
        self._policy = policy
        self._read = head.layers
        self._layers = decoder_layers(self._chunk.hf)
        self._draft_ids = draft_ids
        self._embedding = None
        if head.own_embedding is None:
            table: Any = self._chunk.hf.get_input_embeddings()
            self._embedding = whole(table.weight, policy.compute)
        layer: Any = self._chunk.hf.get_output_embeddings()
        bias = None if layer.bias is None else whole(layer.bias, policy.compute)
        self._head = logprobs.Head(whole(layer.weight, policy.compute), bias, self._chunk.transform)
        policy.train(False)

    @torch.no_grad()
    def read(self, rows: Rows) -> PolicyStates:
        """Return hidden states at the tokens of rows; collective."""
        layout = self._policy.lay_out(rows)
        seen: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for number in self._read:
                hooks.callback(self._watch(number, seen))
            last = self._chunk(layout, None, [HIDDEN], 1.0)["hidden"]
        held = layout.held
        entered = [
            join_tokens(seen[layer].flatten(0, 1)[held.positions], held.tokens, rows.num_tokens, None)
            for layer in self._read
        ]
        joined = torch.cat(entered, -1).to(self._policy.compute) if entered else last[:, :0]
        return PolicyStates(joined, last, self._embedding, self._head, self._draft_ids)

    def _watch(self, number: int, seen: dict[int, Tensor]) -> Any:
        """Keep the hidden states `[batch, seq, hidden]` that enter a layer; return the function that stops it."""

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[number] = args[0] if args else kwargs["hidden_states"]

        def keep_output(module: nn.Module, args: Any, output: Any) -> None:
            seen[number] = output if isinstance(output, Tensor) else output[0]

        if number == len(self._layers):
            return self._layers[-1].register_forward_hook(keep_output).remove
        return self._layers[number].register_forward_pre_hook(keep_input, with_kwargs=True).remove
