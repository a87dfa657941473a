"""Choice of the layers whose activations the backward pass computes again, by the memory of the device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from rl_core.data.microbatch import Batching
from rl_core.facts.vision_size import VisionSize
from rl_core.model_config import ModelConfig
from rl_core.torch.heads.logprobs import CHUNK_SIZE
from rl_core.weights import ITEM_BYTES

_log = logging.getLogger(__name__)

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
    """Activations of a rank's layers in a training step.

    Args:
        layers: Bytes that each layer keeps of a token.
        tokens: Maximum number of tokens of a microbatch on a rank.
        passes: Microbatches whose activations exist at one time.
        images: Bytes that the images of a microbatch keep, without and with recomputation of any layer.
    """

    layers: Sequence[LayerActivations]
    tokens: int
    passes: float
    images: tuple[float, float] = (0.0, 0.0)

    def size(self, plan: RecomputePlan) -> int:
        """Return the bytes of all activations if these layers are recomputed."""
        until = plan.num_full + plan.num_selective
        kept = sum(layer.full for layer in self.layers[: plan.num_full])
        kept += sum(layer.selective for layer in self.layers[plan.num_full : until])
        kept += sum(layer.none for layer in self.layers[until:])
        # A layer that is recomputed has all of its activations while its backward pass runs.
        again = max(layer.none for layer in self.layers) if until else 0
        return round(self.tokens * (self.passes * kept + again) + self.passes * self.images[until > 0])

    def choose(self, plans: Iterable[RecomputePlan], room: int) -> RecomputePlan:
        """Return the first plan whose activations fit, or the last one if none does.

        Args:
            plans: Plans in order of preference, at least one.
            room: Bytes for activations.
        """
        plan = RecomputePlan()
        for plan in plans:
            if self.size(plan) <= room:
                break
        return plan

    def in_words(self, plan: RecomputePlan) -> str:
        """Return the decision for a plan as text."""
        none, full = (self.size(each) / 1e9 for each in (RecomputePlan(), RecomputePlan(num_full=len(self.layers))))
        return (
            f"{plan.in_words(len(self.layers))} recomputed: activations of {self.passes:.1f} microbatches of "
            f"{self.tokens} tokens take {self.size(plan) / 1e9:.1f} GB, {none:.1f} GB without recomputation and "
            f"{full:.1f} GB with full recomputation"
        )


def log_unknown(problem: ActivationsUnknown) -> None:
    """Log that whole layers are recomputed, and why."""
    _log.info("recompute=auto recomputes whole layers: their activations cannot be counted (%s)", problem)


def max_tokens(config: ModelConfig, context_ranks: int) -> int:
    """Return the maximum number of tokens of a training microbatch on a rank."""
    batching = Batching.of(config, training=True)
    rows = batching.max_rows or 1
    longest = config.max_total_sequence_length
    return max(batching.max_tokens or rows * longest, longest) // context_ranks


def image_bytes(config: ModelConfig, hf: PreTrainedConfig, *, recomputes_tower: bool) -> tuple[float, float]:
    """Return the bytes that the images of a microbatch keep, without and with recomputation of any layer. All
    context-parallel ranks compute them.

    Args:
        config: Config of the model.
        hf: Hugging Face config of the whole model.
        recomputes_tower: True if the layers of the vision tower are then recomputed too.
    """
    size = VisionSize.of(hf.to_dict()) if config.vision.enabled else None
    if size is None:
        return 0.0, 0.0
    tokens = size.tokens(config, max_tokens(config, 1))
    itemsize = ITEM_BYTES[config.precision]
    kept, again = (
        size.kept(config.vision, tokens, itemsize, recomputed=each and recomputes_tower) for each in (False, True)
    )
    return kept, again


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
