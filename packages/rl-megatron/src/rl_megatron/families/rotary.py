"""Rotary frequencies as Hugging Face computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC_TYPES = ("linear", "llama3")
"""Kinds whose frequencies depend on the config alone and whose cosines are not scaled."""


def inverse_frequencies(config: Any, dim: int) -> Tensor:
    """float32 `[dim / 2]`.

    Raises:
        ValueError: for a kind of rotary embedding that Megatron's layers do not compute.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    if kind not in STATIC_TYPES:
        raise ValueError(
            f"rotary embedding of type {kind!r} is not supported by rl-megatron; it has default, "
            f"{', '.join(STATIC_TYPES)}"
        )
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies
