"""A model family, and how one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from transformers import PreTrainedConfig

from rl_megatron.conversion.weight_map import WeightMap

GROUP = "rl_megatron.families"
"""Entry points through which other packages offer families. One that is named after Hugging Face's `model_type` is a
`Family`; one named `any` is a function from a Hugging Face config to a `Family`, or to None for a model that it does
not know, and is asked last: a library of many families needs one entry point.
"""

ANY = "any"


@dataclass(frozen=True)
class Family:
    """What Megatron must know of a family.

    Args:
        settings: from the Hugging Face config to fields of Megatron's `TransformerConfig` (of `MLATransformerConfig`
            where `multi_latent_attention` is among them).
        weights: from the Hugging Face config to the maps of all weights of the whole model but for its head.
        rotary_dim: from the Hugging Face config to the dims of a head that rotary embedding turns.
    """

    settings: Callable[[PreTrainedConfig], Mapping[str, Any]]
    weights: Callable[[PreTrainedConfig], list[WeightMap]]
    rotary_dim: Callable[[PreTrainedConfig], int]


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model.

    Raises:
        ValueError: where there is none, naming those there are and how another is added.
    """
    from rl_megatron.families.deepseek import DEEPSEEK_V3
    from rl_megatron.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
    from rl_megatron.families.experts import MIXTRAL, QWEN3_MOE

    built_in = {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "mixtral": MIXTRAL,
        "deepseek_v3": DEEPSEEK_V3,
    }
    if config.model_type in built_in:
        return built_in[config.model_type]
    offered = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != config.model_type, entry.value))
    for entry in offered:
        found: Family | None = None
        if entry.name == config.model_type:
            found = entry.load()
        elif entry.name == ANY:
            found = entry.load()(config)
        if found is not None:
            return found
    raise ValueError(
        f"rl-megatron has no weight mapping for models of type {config.model_type!r}; it has {', '.join(built_in)}. "
        f"Install a package with an entry point named {config.model_type!r} or {ANY!r} in the group {GROUP!r} (such as "
        "one with maps made from megatron-bridge, which cannot be installed beside rl-megatron: it needs "
        "transformers<5), or train with rl-dtensor"
    )
