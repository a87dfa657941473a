"""Floating-point operations of a training step, from the model's shape, and how much of the device they use.

Model FLOPs, after Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B: a
multiplication with its addition counts as two, recomputation for lack of memory does not count, nor do
padding, pairs of tokens in different rows, or keys that a query does not see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl_core.facts.hf_config import HFConfig
from rl_core.metrics import Metric

PEAK_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Words in a GPU's name to its bfloat16 operations per second, dense and summed in float32, as its data sheet has them;
the first that fit count."""


def peak_flops(device_name: str) -> float | None:
    """Return bfloat16 operations per second of a GPU by the name that the driver gives it; None if it is not known."""
    for words, peak in PEAK_FLOPS.items():
        if all(re.search(rf"\b{word}\b", device_name) for word in words.split()):
            return peak
    return None


class AttentionShape(NamedTuple):
    """A layer's attention.

    Args:
        num_heads: Number of heads of queries.
        key_dim, value_dim: of a head.
        window: Tokens that each token sees, itself included; all before it if None.
        chunk: Tokens of each chunk of a row; no token sees another chunk. The whole row if None.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None

    def pair_flops(self) -> int:
        """Forward, for a query and a key that it sees."""
        return 2 * self.num_heads * (self.key_dim + self.value_dim)


SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
"""Kinds of layers that attend within a window or a chunk, as `layer_types` of transformers calls them."""
ROW_LAYERS = frozenset({"full_attention", SLIDING, CHUNKED})
"""Kinds of layers with softmax attention, as Hugging Face configs name them."""

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
"""Kinds of layers that carry a state from token to token."""


def attention_shapes(config: HFConfig) -> tuple[AttentionShape, ...]:
    """Return the attention of every layer of softmax attention; what linear attention adds to its matrices is little.

    Args:
        config: A language model's `transformers` config.
    """
    num_heads = setting(config, "num_attention_heads")
    if not num_heads:
        return ()
    head_dim = setting(config, "head_dim") or setting(config, "hidden_size") // num_heads
    rotary_dim = setting(config, "qk_rope_head_dim")
    key_dim = head_dim if rotary_dim is None else (setting(config, "qk_nope_head_dim") or 0) + rotary_dim
    value_dim = setting(config, "v_head_dim") or head_dim
    window = setting(config, "sliding_window")
    kinds = setting(config, "layer_types")
    if kinds is None:
        kinds = [SLIDING] * setting(config, "num_hidden_layers")
    chunk = setting(config, "attention_chunk_size")
    return tuple(
        AttentionShape(
            num_heads,
            key_dim,
            value_dim,
            window=window if kind == SLIDING else None,
            chunk=chunk if kind == CHUNKED else None,
        )
        for kind in kinds
        if kind in ROW_LAYERS
    )


def setting(config: HFConfig, name: str) -> Any:
    """Return a field of a `transformers` config by the name that most families have for it; None if this one has no
    such field."""
    return config.to_dict().get(config.attribute_map.get(name, name))


class ModelShape(NamedTuple):
    """The numbers that a model's operations follow from.

    Args:
        matrices: Entries of all matrices that a token is multiplied with, including its experts.
        trained: Entries among them that train.
        attention: Attention of each layer that has softmax attention.
    """

    matrices: int
    trained: int
    attention: tuple[AttentionShape, ...]

    def training_flops(self, lengths: ArrayLike) -> float:
        """Return the operations of a forward and a backward pass over rows of these lengths. Products with matrices run
        forward, backward by their inputs and, if they train, by their entries; products of attention run forward and
        backward by both factors."""
        rows = np.asarray(lengths, dtype=np.float64)
        products = 2.0 * rows.sum() * (2 * self.matrices + self.trained)
        attention = 0.0
        for layer in self.attention:
            # The number of pairs of a query and a key that it sees.
            if layer.chunk is not None:
                whole, last = np.divmod(rows, layer.chunk)
                num_pairs = float((whole * layer.chunk * (layer.chunk + 1) / 2 + last * (last + 1) / 2).sum())
            else:
                seen = rows if layer.window is None else np.minimum(rows, layer.window)
                num_pairs = float((seen * (seen + 1) / 2 + (rows - seen) * seen).sum())
            attention += 3.0 * layer.pair_flops() * num_pairs
        return float(products + attention)


def speed_metrics(flops: float, seconds: float, peak: float | None) -> dict[str, Metric]:
    """Return a data-parallel shard's part of `flops` (of the step, on all ranks), `flops_per_second` and, if the
    devices' peak is known, `mfu`: the share of it that was used.

    Args:
        flops: Operations of this shard in the step.
        seconds: Duration of the step.
        peak: Operations per second of the ranks that share the shard, together.
    """
    rate = flops / seconds
    metrics = {
        "flops": Metric(flops, reduction="sum"),
        "flops_per_second": Metric(rate, reduction="sum", over_updates="mean"),
    }
    return metrics if peak is None else {**metrics, "mfu": Metric(rate, weight=peak)}
