"""DeepSeek-V3: multi-head latent attention, shared experts and sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.conversion.splits import Chunks, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.dense import common_settings, embedding_map, final_norm_map, mlp_maps, norm_maps
from rl_megatron.families.experts import PROJECTIONS, expert_maps, router_map
from rl_megatron.families.family import Family


def _settings(config: Any) -> Mapping[str, Any]:
    if config.attention_bias:
        raise ValueError("deepseek_v3 models with attention_bias are not supported by rl-megatron")
    if not config.rope_interleave:
        raise ValueError("deepseek_v3 models with rope_interleave=false are not supported by rl-megatron")
    return {
        **common_settings(config),
        **_rotary(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **_unnormed(config),
    }


def _unnormed(config: Any) -> Mapping[str, Any]:
    if not config.norm_topk_prob:
        raise ValueError("deepseek_v3 models with norm_topk_prob=false are not supported by rl-megatron")
    return {}


def _rotary(config: Any) -> Mapping[str, Any]:
    """Latent attention makes its own rotary embedding. Both default to a scaling of 40."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        return {**plain, "rotary_base": rope["rope_theta"]}
    if rope["rope_type"] != "yarn":
        raise ValueError(
            f"deepseek_v3 models with {rope['rope_type']} rotary embedding are not supported by rl-megatron"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _has_experts(config: Any, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def _weights(config: Any) -> list[WeightMap]:
    maps = [embedding_map(config)]
    hidden = config.hidden_size
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        maps += norm_maps(config, layer)
        maps += _attention_maps(config, layer)
        if not _has_experts(config, layer):
            maps += mlp_maps(hidden, config.intermediate_size, ours, theirs)
            continue
        maps.append(router_map(hidden, config.n_routed_experts, layer, theirs))
        bias = HFTensor(f"{theirs}.gate.e_score_correction_bias", (config.n_routed_experts,))
        maps.append(WeightMap(f"{ours}.router.expert_bias", (bias,), Whole(), dtype="float32"))
        for expert in range(config.n_routed_experts):
            prefix = f"{theirs}.experts.{expert}"
            maps += expert_maps(hidden, config.moe_intermediate_size, layer, expert, prefix, PROJECTIONS)
        width = config.moe_intermediate_size * config.n_shared_experts
        maps += mlp_maps(hidden, width, f"{ours}.shared_experts", f"{theirs}.shared_experts")
    return [*maps, final_norm_map(config)]


def _attention_maps(config: Any, layer: int) -> list[WeightMap]:
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


def _rotary_dim(config: Any) -> int:
    return int(config.qk_rope_head_dim)


DEEPSEEK_V3 = Family(_settings, _weights, _rotary_dim)
