"""In which order a pipeline rank runs its forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one of the rank's chunks."""

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int


def forward_only(rank: int, size: int, num_chunks: int, num_microbatches: int) -> Iterator[Action]:
    """All forward passes, in the order in which `one_forward_one_backward` has them."""
    for unit in range(num_microbatches * num_chunks):
        yield _action("forward", unit, size, num_chunks)


def one_forward_one_backward(rank: int, size: int, num_chunks: int, num_microbatches: int) -> Iterator[Action]:
    """1F1B, interleaved if a rank has several chunks: a few forward passes to fill the pipeline, then a backward
    pass after each, so that no rank keeps the activations of more microbatches than the pipeline is long.

    See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).

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
    """The unit-th pass: `size` microbatches go through one chunk, then through the next."""
    if num_chunks == 1:
        return Action(kind, 0, unit)
    chunk = unit // size % num_chunks
    microbatch = unit // (size * num_chunks) * size + unit % size
    return Action(kind, chunk if kind == "forward" else num_chunks - 1 - chunk, microbatch)
