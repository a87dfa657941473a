"""GLM-4.5: grouped-query attention that rotates part of each head, and routing as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.families.dense import (
    attention_maps,
    embedding_map,
    final_norm_map,
    grouped_query_settings,
    head_dim,
    norm_maps,
)
from rl_megatron.families.family import Family
from rl_megatron.families.sigmoid_routing import sigmoid_maps, sigmoid_settings


def _settings(config: HFConfig) -> Mapping[str, Any]:
    return {
        **grouped_query_settings(config),
        **sigmoid_settings(config),
        "add_qkv_bias": config.attention_bias,
        "qk_layernorm": config.use_qk_norm,
    }


def _weights(config: HFConfig) -> list[WeightMap]:
    maps = [embedding_map(config)]
    for layer in range(config.num_hidden_layers):
        maps += norm_maps(config, layer)
        maps += attention_maps(config, layer, has_bias=config.attention_bias, has_norms=config.use_qk_norm)
        maps += sigmoid_maps(config, layer)
    return [*maps, final_norm_map(config)]


def _rotary_dim(config: HFConfig) -> int:
    return int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


GLM4_MOE = Family(_settings, _weights, _rotary_dim)
