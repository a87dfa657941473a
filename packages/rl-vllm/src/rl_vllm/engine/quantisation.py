"""Arguments of vLLM's engine by which it quantises weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vllm.quantization_config import QuantizationConfig


def quantisation_arguments(quantization: QuantizationConfig | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments by which it quantises linear layers; experts keep their precision.

    Args:
        quantization: Settings; None to quantise nothing.
        fields: Fields of the language model's Hugging Face config.
    """
    if quantization is None:
        return {}
    ignored = quantization.ignored(fields.get("num_hidden_layers", 0))
    return {
        "quantization": "online",
        "quantization_config": {"linear": quantization.method, "ignore": ignored},
    }
