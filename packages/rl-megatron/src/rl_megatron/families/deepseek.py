"""DeepSeek-V3: multi-head latent attention, shared experts and sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.splits import Chunks, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.dense import common_settings, embedding_map, final_norm_map, norm_maps
from rl_megatron.families.family import Family
from rl_megatron.families.rotary import latent_settings
from rl_megatron.families.sigmoid_routing import sigmoid_maps, sigmoid_settings
from rl_megatron.families.supported import bias_problem, interleave_problem, refuse


def _settings(config: HFConfig) -> Mapping[str, Any]:
    fields = config.to_dict()
    refuse(bias_problem(fields))
    refuse(interleave_problem(fields))
    return {
        **common_settings(config),
        **latent_settings(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        **sigmoid_settings(config),
    }


def _weights(config: HFConfig) -> list[WeightMap]:
    maps = [embedding_map(config)]
    for layer in range(config.num_hidden_layers):
        maps += norm_maps(config, layer)
        maps += _attention_maps(config, layer)
        maps += sigmoid_maps(config, layer)
    return [*maps, final_norm_map(config)]


def _attention_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    key_value = heads * (config.qk_nope_head_dim + config.v_head_dim)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    values = heads * config.v_head_dim

    def entry(name: str, source: str, shape: tuple[int, ...], split: Any) -> WeightMap:
        return WeightMap(f"{ours}.{name}.weight", (HFTensor(f"{theirs}.{source}.weight", shape),), split)

    if config.q_lora_rank is None:
        queries = [entry("linear_q_proj", "q_proj", (query, hidden), Chunks(query))]
    else:
        rank = config.q_lora_rank
        queries = [
            entry("linear_q_down_proj", "q_a_proj", (rank, hidden), Whole()),
            entry("q_layernorm", "q_a_layernorm", (rank,), Whole()),
            entry("linear_q_up_proj", "q_b_proj", (query, rank), Chunks(query)),
        ]
    return [
        *queries,
        entry("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent, hidden), Whole()),
        entry("kv_layernorm", "kv_a_layernorm", (config.kv_lora_rank,), Whole()),
        entry("linear_kv_up_proj", "kv_b_proj", (key_value, config.kv_lora_rank), Chunks(key_value)),
        entry("linear_proj", "o_proj", (hidden, values), Chunks(values, dim=1)),
    ]


def _rotary_dim(config: HFConfig) -> int:
    return int(config.qk_rope_head_dim)


DEEPSEEK_V3 = Family(_settings, _weights, _rotary_dim)
