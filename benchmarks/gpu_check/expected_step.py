"""How long a training step should take, from the operations and bytes that the ledger counts for the same code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ledger.step import Workload, model_costs
from transformers import AutoConfig

from gpu_check.expected import Chip
from gpu_check.setup import Shape
from rl_core.torch.training.flops import AttentionShape
from rl_dtensor.config import DTensorConfig

ADAMW_BYTES = 28
"""Read and written for each parameter by AdamW in float32: parameter and both moments twice, the gradient once."""


def step_seconds(
    chip: Chip, folder: Path, shape: Shape, lengths: np.ndarray, settings: Mapping[str, Any], *, chunk_size: int
) -> float:
    """Seconds of a step of one rank on packed rows, if nothing waits.

    Args:
        folder: The model's files.
        lengths: Number of tokens of each row.
        settings: Settings of rl-dtensor that are not the default, such as `recompute`.
        chunk_size: Tokens whose logits exist at one time.
    """
    config, backend = AutoConfig.from_pretrained(folder), DTensorConfig(**settings)
    num_tokens = int(lengths.sum())
    counted = model_costs(config, backend, Workload(num_tokens, chunk_size=chunk_size), num_ranks=1).training
    repeats = 1 if backend.recompute == "full" else 0
    # forward, twice that backward, and once more what is recomputed; the head always computes its logits again
    products = 2 * num_tokens * ((3 + repeats) * shape.num_layer_weights + 4 * shape.num_head_weights)
    attention = attention_flops(shape, lengths)
    seconds = products / chip.products + 3.5 * attention / chip.attention("FA2")
    seconds += repeats * attention / chip.attention_forward["FA2"]
    moved = counted.other.bytes + counted.sharding.bytes
    num_parameters = shape.num_layer_weights + shape.num_head_weights
    return seconds + (moved + ADAMW_BYTES * num_parameters) / chip.memory_bytes


def attention_flops(shape: Shape, lengths: np.ndarray) -> float:
    """Floating-point operations of all layers' attention in a forward pass, without pairs that the mask hides."""
    pairs = (lengths.astype(np.float64) * (lengths + 1) / 2).sum()
    return float(pairs * shape.layers * AttentionShape(shape.heads, shape.head_dim, shape.head_dim).pair_flops())
