"""A model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from rl_megatron.conversion.weight_map import WeightMap


@dataclass(frozen=True)
class Family:
    """The settings and weight maps by which Megatron builds and loads a family.

    Args:
        settings: Function from the Hugging Face config to fields of Megatron's `TransformerConfig` (of
            `MLATransformerConfig` if `multi_latent_attention` is among them).
        weights: Function from the Hugging Face config to the maps of all weights of the whole model but for its head.
        rotary_dim: Function from the Hugging Face config to the dims of a head that rotary embedding turns.
    """

    settings: Callable[[PreTrainedConfig], Mapping[str, Any]]
    weights: Callable[[PreTrainedConfig], list[WeightMap]]
    rotary_dim: Callable[[PreTrainedConfig], int]
