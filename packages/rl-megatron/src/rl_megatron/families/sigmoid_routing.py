"""Mixtures of experts as DeepSeek-V3 has them: sigmoid scores, a correction bias, groups of experts, shared experts."""

from __future__ import annotations

from typing import Any

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.splits import Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.dense import mlp_maps
from rl_megatron.families.experts import PROJECTIONS, expert_maps, router_map
from rl_megatron.families.supported import group_problem, norm_problem, refuse


def sigmoid_settings(config: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's config for the experts.

    Raises:
        ValueError: For a routing that Megatron computes differently from transformers.
    """
    fields = config.to_dict()
    refuse(group_problem(fields))
    refuse(norm_problem(fields))
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **_groups(config),
    }


def sigmoid_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    """The experts of a layer, or the MLP of a dense one."""
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    hidden = config.hidden_size
    if not _has_experts(config, layer):
        return mlp_maps(hidden, config.intermediate_size, ours, theirs)
    bias = HFTensor(f"{theirs}.gate.e_score_correction_bias", (config.n_routed_experts,))
    maps = [
        router_map(hidden, config.n_routed_experts, layer, theirs),
        WeightMap(f"{ours}.router.expert_bias", (bias,), Whole(), dtype="float32"),
    ]
    for expert in range(config.n_routed_experts):
        prefix = f"{theirs}.experts.{expert}"
        maps += expert_maps(hidden, config.moe_intermediate_size, layer, expert, prefix, PROJECTIONS)
    width = config.moe_intermediate_size * config.n_shared_experts
    return [*maps, *mlp_maps(hidden, width, f"{ours}.shared_experts", f"{theirs}.shared_experts")]


def _has_experts(config: HFConfig, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def _groups(config: HFConfig) -> dict[str, int]:
    """Limits to groups of experts; none if every group is chosen."""
    if config.topk_group == config.n_group:
        return {}
    return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
