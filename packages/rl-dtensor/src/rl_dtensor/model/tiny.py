"""A family's config at a tiny size, for trials of its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rl_core.errors import ConfigError

SMALL: Mapping[str, Any] = {
    "vocab_size": 101, "vocab_size_per_layer_input": 101, "hidden_size": 32, "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8, "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "max_position_embeddings": 256, "original_max_position_embeddings": 128, "initializer_range": 0.2,
    "sliding_window": 4, "window_size": 4, "attention_chunk_size": 4, "floor_scale": 4, "query_pre_attn_scalar": 8,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_indices": [1], "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_ssm": 64, "chunk_size": 8, "mamba_chunk_size": 8, "num_kv_shared_layers": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
}  # fmt: skip
"""Sizes of the tiny model, for the fields that have a value in the family's config, under whatever name."""

UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
"""Fields that may have no value by default; not every family's code does without one."""

LAYER_COUNTS = ("num_hidden_layers", "num_blocks", "num_layers", "depth")
"""Names of the number of layers of a part next to the text."""

LONGEST_PERIOD = 8
"""Maximum number of layers of the tiny model."""

MAX_PARAMETERS = 30_000_000
"""Maximum number of parameters of the tiny model, which one process also trains in float64."""


def shrink(config: PreTrainedConfig, sizes: Mapping[str, Any] = SMALL) -> PreTrainedConfig:
    """Return the family's config at a tiny size, without dropout, with one layer of each kind and two at least.

    Args:
        config: Hugging Face config of the model.
        sizes: Sizes by field, as in `SMALL`.

    Raises:
        ConfigError: If the family's own code refuses a config of such sizes.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    called = {name: text.attribute_map.get(name, name) for name in ("num_hidden_layers", *sizes)}
    small = {
        called[name]: value
        for name, value in sizes.items()
        if called[name] in fields
        and (isinstance(fields[called[name]], int | float) or name in UNSET or isinstance(value, list))
    }
    heads, kv_heads = called["num_attention_heads"], called["num_key_value_heads"]
    if kv_heads in small and fields[kv_heads] in (fields.get(heads), None):
        small[kv_heads] = sizes["num_attention_heads"]
    if fields.get(called["num_experts_per_tok"]) == 1:  # Some code supports only one expert (Llama 4 in vLLM).
        small[called["num_experts_per_tok"]] = 1
    if "qk_rope_head_dim" in small and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    small |= {name: 0.0 for name, value in fields.items() if is_dropout(name) and isinstance(value, float)}
    tokens = [name for name, value in sorted(fields.items()) if name.endswith("token_id") and value is not None]
    small |= {name: [place] if isinstance(fields[name], list) else place for place, name in enumerate(tokens)}
    small |= _shorter(fields, called["num_hidden_layers"], sizes)
    if fields.get("linear_key_head_dim", fields.get("linear_value_head_dim")) != fields.get("linear_value_head_dim"):
        # transformers writes convolutions of queries, keys and values as thirds of equal size (OLMo-Hybrid).
        small["linear_value_head_dim"] = fields["linear_key_head_dim"]
    if "max_window_layers" in fields:
        small["max_window_layers"] = 1
    for name in text.sub_configs:
        if isinstance(part := fields.get(name), dict):
            # A part next to the text (images, sound) gets one layer, and fields of equal width stay equal.
            width = part.get("hidden_size")
            of_part = {
                field: sizes[field] for field, value in part.items() if field in sizes and isinstance(value, int)
            }
            as_wide = {field: sizes["hidden_size"] for field, value in part.items() if width and value == width}
            small[name] = {**part, **of_part, **as_wide, **{field: 1 for field in LAYER_COUNTS if field in part}}
    with made_tiny(text.model_type):
        return type(text).from_dict({**fields, **small})


def _shorter(fields: Mapping[str, Any], num_layers: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and the fields with a value for each layer, for one layer of each kind and at least
    two layers.

    Args:
        fields: Fields of the whole model's config.
        num_layers: Name of the field with the number of layers.
        sizes: Sizes by field, as in `SMALL`.
    """
    count = fields.get(num_layers) or 0
    stated = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count}
    sparse = {name: _by_layer(value) for name, value in fields.items() if _by_layer(value)}
    kinds = [
        (*(value[index] for value in stated.values()), *(value.get(index) for value in sparse.values()))
        for index in range(count)
    ]
    first = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index][:LONGEST_PERIOD]
    kept = first if len(first) > 1 else [0, 0]
    small: dict[str, Any] = {num_layers: len(kept)}
    for name, value in stated.items():
        small[name] = [sizes.get(name, value[index]) for index in kept]
    for name, by_layer in sparse.items():
        small[name] = {
            place: {field: sizes.get(field, value) for field, value in by_layer[index].items()}
            for place, index in enumerate(kept)
            if index in by_layer
        }
    return small


def _by_layer(value: Any) -> dict[int, Mapping[str, Any]]:
    """Return the settings of single layers in a field by layer number; empty if it is another kind of field."""
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return {}
    return {int(key): each for key, each in value.items()} if all(str(key).isdigit() for key in value) else {}


def is_dropout(name: str) -> bool:
    """Return whether a field of a config is the share of something that is dropped in training."""
    return name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop"))


def check_size(small: PreTrainedConfig) -> None:
    """Refuse a model that is not tiny because its family has sizes that `SMALL` does not contain."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"it has {count} parameters at the sizes of this check, and may have {MAX_PARAMETERS}")


@contextmanager
def made_tiny(kind: str) -> Iterator[None]:
    """Turn any error of a family's own code, at sizes that it did not foresee, into an answer of the self-check."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # The code of a family may raise anything.
        raise ConfigError(
            f"a tiny {kind} model cannot be made, so this check cannot say: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from None
