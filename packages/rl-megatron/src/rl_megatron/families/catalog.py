"""The families that there are: those of this package, and those that other packages offer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from transformers import PreTrainedConfig

from rl_megatron.families.deepseek import DEEPSEEK_V3
from rl_megatron.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from rl_megatron.families.experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from rl_megatron.families.family import Family
from rl_megatron.families.glm import GLM4_MOE
from rl_megatron.families.qwen3_next import QWEN3_NEXT

GROUP = "rl_megatron.families"
"""Entry points through which other packages offer families. One that is named after Hugging Face's `model_type` is a
`Family`; one named `any` is a function from a Hugging Face config to a `Family`, or to None for a model that it does
not know, and is asked last: a library of many families needs one entry point.
"""

ANY = "any"

BUILT_IN: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
}
"""Model type to its family."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model.

    Raises:
        ValueError: If there is none, naming those there are and how another is added.
    """
    if config.model_type in BUILT_IN:
        return BUILT_IN[config.model_type]
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
        f"model_name: rl-megatron has no weight mapping for models of type {config.model_type!r}; it has "
        f"{', '.join(BUILT_IN)}. "
        f"Install a package with an entry point named {config.model_type!r} or {ANY!r} in the group {GROUP!r} (such as "
        "one with maps made from megatron-bridge, which cannot be installed beside rl-megatron: it needs "
        "transformers<5), or train with rl-dtensor"
    )
