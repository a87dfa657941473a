"""Microbatches through the stages of a pipeline; one stage is its own pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.torch.training.backend import Microbatch, Pass
from rl_dtensor.model.layout import Layout
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.accumulation import Accumulation
from rl_dtensor.parallel.mesh import Direction, Mesh
from rl_dtensor.parallel.schedule import forward_only, one_forward_one_backward


def run_pipeline(
    model: ShardedModel, run: Pass, *, mesh: Mesh, accumulations: Sequence[Accumulation] | None = None
) -> list[Any]:
    """Pass all microbatches through all pipeline ranks; on the last, what `on_reads` returned for each, in order.

    Args:
        model: This rank's chunks of the model.
        run: Microbatches, and what to compute from each.
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
    work.wait()
    return [work.results[index] for index in sorted(work.results)]


@dataclass
class _Passed:
    """Tensors of a forward pass that its backward pass needs."""

    entered: Tensor | None
    left: Tensor


@dataclass
class _Run:
    model: ShardedModel
    run: Pass
    mesh: Mesh
    accumulations: Sequence[Accumulation] | None
    results: dict[int, Any] = field(default_factory=dict)
    _laid_out: dict[int, tuple[Microbatch, Layout]] = field(default_factory=dict)
    _passed: dict[tuple[int, int], _Passed] = field(default_factory=dict)
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    @property
    def has_backward(self) -> bool:
        return self.accumulations is not None

    def forward(self, chunk: int, index: int) -> None:
        microbatch, layout = self._lay_out(index)
        stage = self.model.stages_here[chunk]
        entered = None
        if stage > 0:
            entered = self._receive("forward", layout).requires_grad_(self.has_backward)
        output = self.model.chunks[chunk](layout, entered, self.run.reads, self.run.temperature)
        if stage < self.model.num_stages - 1:
            left = output.to(self.model.compute)
            self._send("forward", left.detach())
        else:
            left = self.run.on_reads(microbatch, output)
            self.results[index] = left.detach() if isinstance(left, Tensor) else left
        if self.has_backward:
            self._passed[chunk, index] = _Passed(entered, left)
        elif chunk == len(self.model.chunks) - 1:
            del self._laid_out[index]

    def backward(self, chunk: int, index: int) -> None:
        assert self.accumulations is not None
        # the schedule has the backward passes of each chunk in the order of microbatches
        self.accumulations[chunk].before_backward(is_last=index == len(self.run.microbatches) - 1)
        passed = self._passed.pop((chunk, index))
        stage = self.model.stages_here[chunk]
        grad = None
        if stage < self.model.num_stages - 1:
            grad = self._receive("backward", self._lay_out(index)[1])
        # what was not kept is computed again
        self.model.chunks[chunk].give_routing(self._lay_out(index)[1])
        if passed.left.requires_grad:
            torch.autograd.backward(passed.left, grad)
        if stage > 0:
            assert passed.entered is not None
            assert passed.entered.grad is not None
            self._send("backward", passed.entered.grad)
        if chunk == 0:
            del self._laid_out[index]

    def wait(self) -> None:
        """Until the neighbours have everything."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _lay_out(self, index: int) -> tuple[Microbatch, Layout]:
        """A microbatch and its layout, kept until its last pass."""
        if index not in self._laid_out:
            microbatch = self.run.microbatches[index]()
            self._laid_out[index] = microbatch, self.model.lay_out(microbatch.rows)
        return self._laid_out[index]

    def _send(self, direction: Direction, tensor: Tensor) -> None:
        rank, size = self.mesh.on("pp"), self.mesh.sizes.pp
        peer = (rank + (1 if direction == "forward" else -1)) % size
        group = self.mesh.edges[direction, rank]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=_place(rank, peer))
        assert work is not None
        self._sent = [(sent, kept) for sent, kept in self._sent if not sent.is_completed()]
        self._sent.append((work, tensor))

    def _receive(self, direction: Direction, layout: Layout) -> Tensor:
        rank, size = self.mesh.on("pp"), self.mesh.sizes.pp
        peer = (rank - (1 if direction == "forward" else -1)) % size
        group = self.mesh.edges[direction, peer]
        tensor = torch.empty(self.model.hidden_shape(layout), dtype=self.model.compute, device=self.mesh.device)
        dist.recv(tensor, group=group, group_src=_place(rank, peer))
        return tensor


def _place(rank: int, peer: int) -> int:
    """A peer's rank in the group of two."""
    return 0 if peer < rank else 1
