"""The families of this package, and the families that other packages offer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from transformers import PreTrainedConfig

from rl_megatron.families.deepseek import DEEPSEEK_V3, GLM4_MOE
from rl_megatron.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3, Family
from rl_megatron.families.experts import MIXTRAL, QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from rl_megatron.families.gemma3 import GEMMA3
from rl_megatron.families.gpt_oss import GPT_OSS
from rl_megatron.families.supported import REFUSED

GROUP = "rl_megatron.families"
"""Entry points through which other packages offer families. One that is named after Hugging Face's `model_type` is a
`Family`. One named `any` is a function from a Hugging Face config to a `Family`, or to None for a model that it does
not know, and is called last: a library of many families needs one entry point.
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
    "glm4_moe_lite": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "gemma3_text": GEMMA3,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3_vl_text": QWEN3,
}
"""Model type to its family."""


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model.

    Raises:
        ValueError: If there is none, with the known families and the way to add another.
    """
    kind = config.model_type
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != kind, entry.value)):
        found: Family | None = None
        if entry.name == kind:
            found = entry.load()
        elif entry.name == ANY:
            found = entry.load()(config)
        if found is not None:
            return found
    if kind in REFUSED:
        raise ValueError(
            f"model_name: models of type {kind!r} are not supported: {REFUSED[kind]}; train with rl-dtensor"
        )
    raise ValueError(
        f"model_name: rl-megatron has no weight mapping for models of type {kind!r}; it has {', '.join(BUILT_IN)}. "
        f"Install a package with an entry point named {kind!r} or {ANY!r} in the group {GROUP!r} (such as "
        "one with maps made from megatron-bridge, which cannot be installed beside rl-megatron: it needs "
        "transformers<5), or train with rl-dtensor"
    )
