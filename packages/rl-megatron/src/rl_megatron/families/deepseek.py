"""DeepSeek-V3 and Moonlight, and GLM-4.5 to 4.7, which share their mixture of experts.

DeepSeek-V3 and GLM-4.7-Flash have multi-head latent attention; the other GLM models have grouped-query attention that
rotates part of each head. All have experts with sigmoid scores, a correction bias, groups and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.facts.hf_config import HFConfig
from rl_megatron.conversion.splits import Chunks, Split, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families import dense
from rl_megatron.families.experts import routed_maps
from rl_megatron.families.rotary import latent_settings
from rl_megatron.families.supported import bias_problem, group_problem, interleave_problem, norm_problem, refuse


def _sigmoid_settings(config: HFConfig) -> dict[str, Any]:
    """Return the fields of Megatron's config for the experts.

    Raises:
        ValueError: For a routing that Megatron computes differently from transformers.
    """
    fields = config.to_dict()
    refuse(group_problem(fields))
    refuse(norm_problem(fields))
    settings = {
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }
    if config.topk_group == config.n_group:  # Every group is chosen.
        return settings
    return {**settings, "moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _has_experts(config: HFConfig, layer: int) -> bool:
    kinds = config.to_dict().get("mlp_layer_types")
    return bool(layer >= config.first_k_dense_replace if kinds is None else kinds[layer] == "sparse")


def _sigmoid_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    """Return the maps of the experts of a layer, or of the MLP of a dense one."""
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    hidden, num_experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    if not _has_experts(config, layer):
        return dense.mlp_maps(hidden, config.intermediate_size, ours, theirs)
    source = HFTensor(f"{theirs}.gate.e_score_correction_bias", (num_experts,))
    bias = WeightMap(f"{ours}.router.expert_bias", (source,), Whole(), dtype="float32")
    router, *experts = routed_maps(config, layer, num_experts, width, theirs)
    shared = dense.mlp_maps(
        hidden, width * config.n_shared_experts, f"{ours}.shared_experts", f"{theirs}.shared_experts"
    )
    return [router, bias, *experts, *shared]


def _deepseek_settings(config: HFConfig) -> Mapping[str, Any]:
    fields = config.to_dict()
    refuse(bias_problem(fields))
    refuse(interleave_problem(fields))
    return {
        **dense.common_settings(config),
        **latent_settings(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        **_sigmoid_settings(config),
    }


def _deepseek_layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    key_value = heads * (config.qk_nope_head_dim + config.v_head_dim)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    values = heads * config.v_head_dim

    def entry(name: str, source: str, shape: tuple[int, ...], split: Split) -> WeightMap:
        return dense.single_map(f"{ours}.{name}.weight", f"{theirs}.{source}.weight", shape, split)

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
        *_sigmoid_maps(config, layer),
    ]


def _glm_settings(config: HFConfig) -> Mapping[str, Any]:
    further = {"add_qkv_bias": config.attention_bias, "qk_layernorm": config.use_qk_norm}
    return {**dense.grouped_query_settings(config), **_sigmoid_settings(config), **further}


def _glm_layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    attention = dense.attention_maps(config, layer, has_bias=config.attention_bias, has_norms=config.use_qk_norm)
    return [*attention, *_sigmoid_maps(config, layer)]


DEEPSEEK_V3 = dense.Family(
    _deepseek_settings,
    lambda config: dense.model_maps(config, _deepseek_layer_maps),
    lambda config: int(config.qk_rope_head_dim),
)
GLM4_MOE = dense.Family(
    _glm_settings, lambda config: dense.model_maps(config, _glm_layer_maps), dense.partial_rotary_dim
)
