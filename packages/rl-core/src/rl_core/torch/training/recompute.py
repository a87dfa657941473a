"""Choice of the layers whose activations the backward pass computes again, by the memory of the device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl_core.data.microbatch import Batching
from rl_core.model_config import ModelConfig
from rl_core.torch.heads.logprobs import CHUNK_SIZE

_log = logging.getLogger(__name__)

USABLE = 0.9
"""Share of a device's memory that is planned with; communication, fragmentation and small tensors have the rest."""
LOGIT_COPIES = 3
"""Float32 tensors of the size of a chunk's logits that the head has at one time."""
WIDE = torch.float32.itemsize
"""Bytes of a value in float32."""


class ActivationsUnknown(Exception):
    """The activations of a model cannot be counted."""


class LayerActivations(NamedTuple):
    """Bytes per token that a layer keeps between its forward and its backward pass.

    Args:
        none: If nothing is recomputed.
        selective: If the parts of selective recomputation are.
        full: If all of it is.
    """

    none: int
    selective: int
    full: int


@dataclass(frozen=True)
class RecomputePlan:
    """The layers that the backward pass computes again.

    Args:
        num_full: First layers that keep only their input.
        num_selective: Layers after these that recompute selectively.
    """

    num_full: int = 0
    num_selective: int = 0

    def clamped(self, num_layers: int) -> RecomputePlan:
        """Return the plan of a stage with this number of layers."""
        full = min(self.num_full, num_layers)
        return RecomputePlan(full, min(self.num_selective, num_layers - full))

    def of_chunks(self, num_chunks: int) -> RecomputePlan:
        """Return the plan of each of several equal runs of the layers."""
        return RecomputePlan(-(-self.num_full // num_chunks), -(-self.num_selective // num_chunks))

    def in_words(self, num_layers: int) -> str:
        """Return the plan of so many layers as text."""
        parts = [f"{self.num_full} in full"] if self.num_full else []
        parts += [f"{self.num_selective} selectively"] if self.num_selective else []
        return f"{' and '.join(parts)} of {num_layers} layers" if parts else "no layer"


class ActivationMemory(NamedTuple):
    """Memory of a rank's device, and the tokens whose activations are in it.

    Args:
        capacity: Bytes of the device.
        other: Bytes of everything except activations: parameters, gradients, optimizer state, logits.
        tokens: Maximum number of tokens of a microbatch on a rank.
        passes: Microbatches whose activations exist at one time.
    """

    capacity: int
    other: int
    tokens: int
    passes: float

    @property
    def room(self) -> int:
        """Bytes for activations; negative if there are none left."""
        return round(USABLE * self.capacity) - self.other

    def choose(
        self, plans: Iterable[RecomputePlan], layers: Sequence[LayerActivations], *, logs: bool
    ) -> RecomputePlan:
        """Return the first plan whose activations fit, logged with its reason; the last one if none does.

        Args:
            plans: Plans in order of preference.
            layers: What each layer of the rank keeps of a token.
            logs: True for the rank that logs the choice.
        """
        plan = smallest_plan(plans, layers, self.tokens, self.room, passes=self.passes)
        if logs:
            kept = self.passes * self.tokens
            _log.info(
                "recompute=auto recomputes %s: %.1f GB of %.1f GB are left for activations of %.1f microbatches of %d "
                "tokens, which take %.1f GB without recomputation and %.1f GB with it in full",
                plan.in_words(len(layers)),
                max(self.room, 0) / 1e9,
                self.capacity / 1e9,
                self.passes,
                self.tokens,
                kept * sum(layer.none for layer in layers) / 1e9,
                kept * sum(layer.full for layer in layers) / 1e9,
            )
        return plan


def smallest_plan(
    plans: Iterable[RecomputePlan], layers: Sequence[LayerActivations], tokens: int, room: int, *, passes: float = 1.0
) -> RecomputePlan:
    """Return the first plan whose activations fit, or the last one if none does.

    Args:
        plans: Plans in order of preference, at least one.
        layers: What each layer keeps of a token.
        tokens: Tokens of a microbatch.
        room: Bytes for activations.
        passes: Microbatches whose activations exist at one time.
    """
    # A layer that is recomputed has all of its activations while its backward pass runs.
    again = tokens * max(layer.none for layer in layers)
    plan = RecomputePlan()
    for plan in plans:
        until = plan.num_full + plan.num_selective
        kept = sum(layer.full for layer in layers[: plan.num_full])
        kept += sum(layer.selective for layer in layers[plan.num_full : until])
        kept += sum(layer.none for layer in layers[until:])
        if passes * tokens * kept + (again if plan != RecomputePlan() else 0) <= room:
            return plan
    return plan


def log_unknown(problem: ActivationsUnknown) -> None:
    """Log that whole layers are recomputed, and why."""
    _log.info("recompute=auto recomputes whole layers: their activations cannot be counted (%s)", problem)


def max_tokens(config: ModelConfig, context_ranks: int) -> int:
    """Return the maximum number of tokens of a training microbatch on a rank."""
    batching = Batching.of(config, training=True)
    rows = batching.max_rows or 1
    longest = config.max_total_sequence_length
    return max(batching.max_tokens or rows * longest, longest) // context_ranks


def passes_kept(num_ranks: int, num_chunks: int) -> float:
    """Return the maximum number of microbatches whose activations the first pipeline rank holds of all its layers.

    Args:
        num_ranks: Pipeline ranks.
        num_chunks: Runs of consecutive layers on each of them.
    """
    if num_chunks == 1:
        return num_ranks
    return (2 * (num_ranks - 1) + (num_chunks - 1) * num_ranks + 1) / num_chunks


def logit_bytes(config: ModelConfig, vocab: int) -> int:
    """Return the bytes of the logits that exist at one time, of so many tokens of the vocabulary."""
    # By default kernels take larger chunks, in no more memory.
    return LOGIT_COPIES * WIDE * (config.logprob_chunk_size or CHUNK_SIZE) * vocab


def least_capacity(capacity: int | None, group: dist.ProcessGroup) -> int:
    """Return the smallest capacity of the devices of all ranks, in bytes; 0 if one has no memory of its own.

    Collective.

    Args:
        capacity: Bytes of this rank's device; None if it has no memory of its own.
        group: All ranks, on gloo.
    """
    least = torch.tensor(capacity or 0)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least.item())
