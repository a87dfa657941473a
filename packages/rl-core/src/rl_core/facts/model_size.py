"""Numbers of a model's parameters, from the fields of its config or from its name, and the memory that a rank needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.facts.hf_config import num_experts_of

WIDE_BYTES = 4
"""Bytes of a float32, the dtype of summed gradients and of optimizers."""
MOMENTS = 2
"""Tensors that optimizers such as Adam keep for each parameter."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?:-A(\d+(?:\.\d+)?)B)?(?![A-Za-z0-9])", re.IGNORECASE)
_UNITS = {"B": 10**9, "M": 10**6}


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model's parameters.

    Args:
        layers: Parameters in layers, outside of experts.
        experts: Parameters in experts.
        embedding: Parameters of the embedding.
        head: Parameters of the head; 0 if it is tied to the embedding.
    """

    layers: float
    experts: float = 0
    embedding: float = 0
    head: float = 0

    @property
    def count(self) -> float:
        """All parameters."""
        return self.layers + self.experts + self.embedding + self.head

    def dense_of_stage(self, stages: int) -> float:
        """Return the parameters outside of experts on the largest of several pipeline stages."""
        ends = self.embedding + self.head if stages == 1 else max(self.embedding, self.head)
        return self.layers / stages + ends


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank needs for a model, next to activations and logits.

    Args:
        device: Weights, gradients and optimizer state on the device.
        kept: The part of it that waits in host memory while others use the device.
        weights: Weights that train.
        host: Bytes that are always in host memory.
    """

    device: float
    kept: float
    weights: float
    host: float = 0


def size_of_fields(fields: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a decoder with gated MLPs, without norms and biases; None if the fields do not determine it.

    Args:
        fields: Fields of the language model's Hugging Face config.
    """
    values = [fields.get(name) for name in _SIZES]
    if not all(isinstance(value, int) and value > 0 for value in values) or fields.get("kv_lora_rank"):
        return None
    hidden, layers, heads, inner, vocab = (int(value or 0) for value in values)
    head_dim = fields.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + (fields.get("num_key_value_heads") or heads))
    count = num_experts_of(fields)
    sparse = layers - int(fields.get("first_k_dense_replace") or 0) if count else 0
    expert = 3 * hidden * (fields.get("moe_intermediate_size") or inner)
    dense = layers * attention + (layers - sparse) * 3 * hidden * inner
    embedding = vocab * hidden
    return ModelSize(dense, sparse * count * expert, embedding, 0 if fields.get("tie_word_embeddings") else embedding)


def size_of_name(name: str) -> ModelSize | None:
    """Return the size in a model's name, such as `Llama-3.3-70B` or `Qwen3-30B-A3B`; None if it has none."""
    found = _IN_NAME.search(name.rstrip("/").rpartition("/")[2])
    if found is None:
        return None
    count, unit, active = found.groups()
    whole = float(count) * _UNITS[unit.upper()]
    dense = float(active) * _UNITS["B"] if active else whole
    return ModelSize(min(dense, whole), max(0.0, whole - dense))
