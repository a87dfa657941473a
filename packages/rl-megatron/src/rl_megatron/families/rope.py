"""Types of rotary embeddings that rl-megatron computes as transformers does, only from the fields of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.hf_config import rope_parameters

TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies depend only on the config, not on the length of rows."""

LATENT_TYPES = ("default", "yarn")
"""Types of multi-head latent attention, which makes its own rotary embedding."""

WHOLE_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v3")
"""Model types that rotate whole heads, whatever `partial_rotary_factor` is."""


def rope_problem(fields: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a model whose rotary embedding rl-megatron does not compute; None if it does.

    Args:
        fields: The language model's Hugging Face config, in the names of transformers 5 or in older ones.
    """
    rope = rope_parameters(fields)
    kind = _type_of(rope)
    is_latent = bool(fields.get("kv_lora_rank"))
    types = LATENT_TYPES if is_latent else TYPES
    if any(isinstance(each, Mapping) for each in rope.values()):
        found, known = "with parameters for each kind of layer", "the same parameters in all layers"
    elif kind not in types:
        found, known = f"of type {kind!r}", ", ".join(types)
    elif kind == "yarn" and is_latent and not rope.get("truncate", True):
        found, known = "of type 'yarn' with truncate=false", "truncate=true"
    elif kind == "yarn" and not (rope.get("factor") or 0) > 1:
        found, known = f"of type 'yarn' with factor={rope.get('factor')}", "factors above 1"
    elif kind != "default" and _is_partial(rope, fields):
        found, known = f"of type {kind!r} with partial_rotary_factor", "whole heads of this type of model"
    else:
        return None
    return Problem(
        "",
        f"has a rotary embedding {found}, which rl-megatron does not support",
        allowed=known,
        remedy="Set rope_parameters in hf_config_overrides, or choose another backend: dtensor_cfg for training, vllm "
        "for generation",
    )


def fusion_problem(fields: Mapping[str, Any], megatron_kwargs: Mapping[str, Any]) -> Problem | None:
    """Return the problem of `megatron_kwargs.apply_rope_fusion` with a model that it does not fit; None if it does."""
    is_scaled = _type_of(rope_parameters(fields)) == "yarn" and not fields.get("kv_lora_rank")
    if not is_scaled or not megatron_kwargs.get("apply_rope_fusion"):
        return None
    return Problem(
        "megatron_cfg.megatron_kwargs.apply_rope_fusion",
        "does not scale the cosines and sines of packed rows, which a rotary embedding of type 'yarn' needs",
        remedy="Remove this key",
    )


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _is_partial(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether a factor is set that the family ignores: transformers has too few frequencies for its heads then,
    except with the default type."""
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return share not in (None, 1) and fields.get("model_type") in WHOLE_FAMILIES
