"""How long a training step should take, from the operations and bytes that the ledger counts for the same code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ledger.flash import inner_backward
from ledger.phases import ADAMW_BYTES, host_seconds, overlapped
from ledger.step import Workload, layer_costs
from transformers import AutoConfig

from gpu_check.expected import Chip
from gpu_check.setup import Shape
from rl_core.torch.training.flops import AttentionShape
from rl_dtensor.config import DTensorConfig

OPTIMIZER_LAUNCHES = 12
"""Launches of a step of the optimizer: norms of all gradients and their sum, clipping, and the fused step."""


def step_seconds(
    chip: Chip, folder: Path, shape: Shape, lengths: np.ndarray, settings: Mapping[str, Any], *, chunk_size: int
) -> float:
    """Return the seconds of a step of one rank on packed rows, if nothing waits except the device for the host's
    launches, and the host for the norm of the gradient.

    Args:
        folder: The model's files.
        lengths: Number of tokens of each row.
        settings: Settings of rl-dtensor that are not the default, such as `recompute`.
        chunk_size: Tokens whose logits exist at one time.
    """
    config, backend = AutoConfig.from_pretrained(folder), DTensorConfig(**settings)
    num_tokens = int(lengths.sum())
    layer, rest = layer_costs(config, backend, Workload(num_tokens, chunk_size=chunk_size), num_ranks=1)
    attention, repeats = attention_flops(shape, lengths), 1 if backend.recompute == "full" else 0
    product = 2 * num_tokens / chip.products
    groups = inner_backward("FA2", num_tokens, shape.heads, shape.key_value_heads, shape.head_dim).by_groups
    forward = product * shape.num_layer_weights + attention / chip.attention_forward["FA2"]
    # Twice the products of the forward pass, and those that are computed again.
    backward = 2 * product * shape.num_layer_weights + 2.5 * attention / chip.attention_backward["FA2"]
    backward += repeats * forward + shape.layers * groups.bytes / chip.memory_bytes
    # The head computes its logits again to know their gradient.
    head = product * shape.num_head_weights
    passes = [
        (shape.layers, layer.forward, forward),
        (1, rest.forward, head),
        (1, rest.backward, 3 * head),
        (shape.layers, layer.backward, backward),
    ]
    seconds = overlapped(
        [
            (
                count * host_seconds(costs, chip),
                computing + count * (costs.other.bytes + costs.sharding.bytes) / chip.memory_bytes,
            )
            for count, costs, computing in passes
        ]
    )
    # The norm is read before the optimizer steps.
    num_parameters = shape.num_layer_weights + shape.num_head_weights
    return seconds + max(OPTIMIZER_LAUNCHES * chip.launch_seconds, ADAMW_BYTES * num_parameters / chip.memory_bytes)


def attention_flops(shape: Shape, lengths: np.ndarray) -> float:
    """Return the floating-point operations of all layers' attention in a forward pass, without pairs that the mask
    hides."""
    pairs = (lengths.astype(np.float64) * (lengths + 1) / 2).sum()
    return float(pairs * shape.layers * AttentionShape(shape.heads, shape.head_dim, shape.head_dim).pair_flops())
