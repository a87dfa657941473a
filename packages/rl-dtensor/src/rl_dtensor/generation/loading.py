"""A Hugging Face model made ready for generation."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rl_core.errors import ConfigError
from rl_core.model_config import ModelConfig

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_model(model: ModelConfig, attn_implementation: str, device: torch.device) -> PreTrainedModel:
    """The causal language model `model.model_name` in its precision, without dropout.

    Raises:
        ConfigError: for a field in `hf_config_overrides` that the model does not have, layers that keep more than
            keys and values, or attention that `attn_implementation` does not compute.
    """
    config = hf_config(model)
    fields = config.to_dict()
    layer_types = set(fields.get("layer_types") or ())
    if layer_types - _LAYER_TYPES:
        raise ConfigError(
            f"the hf generator decodes {' and '.join(sorted(_LAYER_TYPES))} layers, {model.model_name} has "
            f"{', '.join(sorted(layer_types - _LAYER_TYPES))}; use another generation.backend"
        )
    if fields.get("attn_logit_softcapping") and attn_implementation == "sdpa":
        raise ConfigError(
            f"sdpa computes attention without the softcap that {model.model_name} has; "
            "set hf_cfg.attn_implementation=eager"
        )
    loaded = AutoModelForCausalLM.from_pretrained(
        model.model_name,
        config=config,
        dtype=getattr(torch, model.precision),
        attn_implementation=attn_implementation,
    )
    return loaded.to(device).eval().requires_grad_(False)


def hf_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's Hugging Face config with the overrides; raises `ConfigError` naming one it does not know."""
    config, unknown = AutoConfig.from_pretrained(
        model.model_name, return_unused_kwargs=True, **model.hf_config_overrides
    )
    if unknown:
        raise ConfigError(f"hf_config_overrides: {model.model_name} has no {', '.join(sorted(unknown))}")
    return config
