"""Microbatches through the stages of a pipeline; a single stage is its own pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.training.backend import Microbatch, Pass
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.mesh import Direction, DTensorMesh


class PipelineResults(NamedTuple):
    """The results of passes.

    Args:
        of_reads: Results of `on_reads` in the order of the microbatches; none on ranks before the last.
        num_shared: Number of tokens that were not computed because another row of their microbatch has them.
    """

    of_reads: list[Any]
    num_shared: int


def run_pipeline(
    model: ShardedModel, run: Pass, *, mesh: DTensorMesh, accumulations: Sequence[Accumulation] | None = None
) -> PipelineResults:
    """Pass all microbatches through all pipeline ranks.

    Args:
        model: This rank's chunks of the model.
        run: Microbatches, and their reads.
        mesh: Mesh, whose `pp` axis is the pipeline.
        accumulations: Accumulation of gradients of each chunk, to run backward passes too; None to run none.
    """
    work = _Run(model, run, mesh, accumulations)
    order = forward_only if accumulations is None else one_forward_one_backward
    for action in order(mesh.on("pp"), mesh.sizes.pp, len(model.chunks), len(run.microbatches)):
        if action.kind == "forward":
            work.forward(action.chunk, action.microbatch)
        else:
            work.backward(action.chunk, action.microbatch)
    for sending, _ in work.sent:
        sending.wait()
    return PipelineResults([work.results[index] for index in sorted(work.results)], work.num_shared)


class _Run:
    def __init__(
        self, model: ShardedModel, run: Pass, mesh: DTensorMesh, accumulations: Sequence[Accumulation] | None
    ) -> None:
        self._model, self._run, self._mesh = model, run, mesh
        self._accumulations = accumulations
        self._laid_out: dict[int, tuple[Microbatch, RowLayout]] = {}
        # Hidden states that entered and left a chunk are kept until its backward pass.
        self._passed: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.results: dict[int, Any] = {}
        self.num_shared = 0
        self.sent: list[tuple[dist.Work, Tensor]] = []

    def forward(self, chunk: int, index: int) -> None:
        microbatch, layout = self._lay_out(index)
        stage, has_backward = self._model.stages_here[chunk], self._accumulations is not None
        entered = None
        if stage > 0:
            entered = self._receive("forward", layout).requires_grad_(has_backward)
        output = self._model.chunks[chunk](layout, entered, self._run.reads, self._run.temperature)
        if stage < self._model.num_stages - 1:
            left = output.to(self._model.compute)
            self._send("forward", left.detach())
        else:
            left = self._run.on_reads(microbatch, output)
            self.results[index] = left.detach() if isinstance(left, Tensor) else left
        if has_backward:
            self._passed[chunk, index] = entered, left
        elif chunk == len(self._model.chunks) - 1:
            del self._laid_out[index]

    def backward(self, chunk: int, index: int) -> None:
        assert self._accumulations is not None
        # The schedule has the backward passes of each chunk in the order of microbatches.
        self._accumulations[chunk].before_backward(is_last=index == len(self._run.microbatches) - 1)
        entered, left = self._passed.pop((chunk, index))
        stage, layout = self._model.stages_here[chunk], self._lay_out(index)[1]
        grad = None
        if stage < self._model.num_stages - 1:
            grad = self._receive("backward", layout)
        # Activations that were not kept are computed again.
        self._model.chunks[chunk].give(layout)
        if left.requires_grad:
            torch.autograd.backward(left, grad)
        if stage > 0:
            assert entered is not None
            assert entered.grad is not None
            self._send("backward", entered.grad)
        if chunk == 0:
            del self._laid_out[index]

    def _lay_out(self, index: int) -> tuple[Microbatch, RowLayout]:
        """Return a microbatch and its layout, kept until its last pass."""
        if index not in self._laid_out:
            microbatch = self._run.microbatches[index]()
            layout = self._model.lay_out(microbatch.rows, self._run.reads)
            self._laid_out[index] = microbatch, layout
            self.num_shared += 0 if layout.tree is None else layout.tree.num_shared
        return self._laid_out[index]

    def _send(self, direction: Direction, tensor: Tensor) -> None:
        rank, size = self._mesh.on("pp"), self._mesh.sizes.pp
        peer = (rank + (1 if direction == "forward" else -1)) % size
        tensor = tensor.contiguous()
        # A group has two ranks, the lower one first.
        work = dist.isend(tensor, group=self._mesh.edges[direction, rank], group_dst=int(peer > rank))
        assert work is not None
        self.sent = [(sending, kept) for sending, kept in self.sent if not sending.is_completed()]
        self.sent.append((work, tensor))

    def _receive(self, direction: Direction, layout: RowLayout) -> Tensor:
        rank, size = self._mesh.on("pp"), self._mesh.sizes.pp
        peer = (rank - (1 if direction == "forward" else -1)) % size
        tensor = torch.empty(self._model.hidden_shape(layout), dtype=self._model.compute, device=self._mesh.device)
        dist.recv(tensor, group=self._mesh.edges[direction, peer], group_src=int(peer > rank))
        return tensor


class Action(NamedTuple):
    """One pass of one microbatch through one of the rank's chunks."""

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int


def forward_only(rank: int, size: int, num_chunks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield all forward passes, in the order of `one_forward_one_backward`."""
    for unit in range(num_microbatches * num_chunks):
        yield _action("forward", unit, size, num_chunks)


def one_forward_one_backward(rank: int, size: int, num_chunks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the passes of 1F1B, interleaved if a rank has several chunks.

    A few forward passes fill the pipeline. Then a backward pass follows each forward pass, so that no rank keeps the
    activations of more microbatches than the pipeline is long. See Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM" (2021).

    Args:
        rank: Pipeline rank, from 0.
        size: Number of pipeline ranks.
        num_chunks: Number of model chunks per rank.
        num_microbatches: Number of microbatches; a multiple of `size` if there are several chunks.
    """
    total = num_microbatches * num_chunks
    ahead = size - rank - 1 if num_chunks == 1 else 2 * (size - rank - 1) + (num_chunks - 1) * size
    ahead = min(ahead, total)
    for unit in range(ahead):
        yield _action("forward", unit, size, num_chunks)
    for unit in range(ahead, total):
        yield _action("forward", unit, size, num_chunks)
        yield _action("backward", unit - ahead, size, num_chunks)
    for unit in range(total - ahead, total):
        yield _action("backward", unit, size, num_chunks)


def _action(kind: Literal["forward", "backward"], unit: int, size: int, num_chunks: int) -> Action:
    """Return the unit-th pass: `size` microbatches go through one chunk, then through the next."""
    if num_chunks == 1:
        return Action(kind, 0, unit)
    chunk = unit // size % num_chunks
    microbatch = unit // (size * num_chunks) * size + unit % size
    return Action(kind, chunk if kind == "forward" else num_chunks - 1 - chunk, microbatch)
