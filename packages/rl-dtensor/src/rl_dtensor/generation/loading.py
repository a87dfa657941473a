"""A Hugging Face model made ready for generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from rl_core.errors import ConfigError
from rl_core.model_config import ModelConfig
from rl_core.torch.training.flops import RECURRENT_LAYERS, ROW_LAYERS
from rl_dtensor.generation.cache import Kind, RowCache, has_states, row_layers

_LAYER_TYPES = ROW_LAYERS | RECURRENT_LAYERS

_PROBE_TOKENS = 9


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
    try:
        kinds = row_layers(config)
    except ValueError as error:
        raise ConfigError(
            f"the hf generator cannot decode {model.model_name}: {error}; use another generation.backend"
        ) from None
    if fields.get("attn_logit_softcapping") and attn_implementation == "sdpa":
        raise ConfigError(
            f"sdpa computes attention without the softcap that {model.model_name} has; "
            "set hf_cfg.attn_implementation=eager"
        )
    if attn_implementation == "sdpa" and not _has_sdpa(config):
        raise ConfigError(
            f"transformers does not compute the attention of {model.model_name} with sdpa; set "
            "hf_cfg.attn_implementation=eager"
        )
    loaded = AutoModelForCausalLM.from_pretrained(
        model.model_name,
        config=config,
        dtype=getattr(torch, model.precision),
        attn_implementation=attn_implementation,
    )
    loaded = loaded.to(device).eval().requires_grad_(False)
    _check_decoding(loaded, kinds, model.model_name)
    return loaded


def _has_sdpa(config: PreTrainedConfig) -> bool:
    """Whether the family's code takes `sdpa`; true of code that comes with the model, which says so itself."""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa


@torch.inference_mode()
def _check_decoding(hf: PreTrainedModel, kinds: Sequence[Kind], name: str) -> None:
    """Refuse a model that does not compute the same token by token as in one pass.

    Of models without states, logprobs are compared in float32 alone: in bfloat16 rounding may choose other experts.

    Raises:
        ConfigError: with what its code says, or how far they are off.
    """
    vocab_size = hf.get_input_embeddings().num_embeddings
    tokens = torch.arange(_PROBE_TOKENS, device=hf.device)[None] % vocab_size
    cache, parts = RowCache(kinds), []
    try:
        for part in tokens.split((3, *[1] * (_PROBE_TOKENS - 3)), 1):
            past = cache.get_seq_length()
            places = torch.arange(past, past + part.shape[1], device=hf.device)[None]
            parts.append(hf(input_ids=part, position_ids=places, past_key_values=cache, use_cache=True).logits)
        whole = hf(input_ids=tokens, use_cache=False).logits
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # of the family's code
        problem = f"{type(error).__name__}: {error}"
    else:
        is_comparable = has_states(kinds) or whole.dtype == torch.float32
        off = (torch.cat(parts, 1).float().log_softmax(-1) - whole.float().log_softmax(-1)).abs().max().item()
        if off <= 4 * torch.finfo(whole.dtype).eps ** 0.5 or not is_comparable:
            return
        problem = f"logprobs are off by {off:.2g}"
    raise ConfigError(
        f"the hf generator cannot decode {name}: its code in transformers does not compute the same token by token as "
        f"in one pass ({problem}); use another generation.backend"
    )


def hf_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's Hugging Face config with the overrides; raises `ConfigError` naming one it does not know."""
    config, unknown = AutoConfig.from_pretrained(
        model.model_name, return_unused_kwargs=True, **model.hf_config_overrides
    )
    if unknown:
        raise ConfigError(f"hf_config_overrides: {model.model_name} has no {', '.join(sorted(unknown))}")
    return config
