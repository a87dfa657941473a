"""Qwen2-MoE, Qwen3-MoE and Mixtral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.splits import Chunks, Whole, gate_up
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.dense import (
    attention_maps,
    dense_settings,
    embedding_map,
    final_norm_map,
    head_dim,
    mlp_maps,
    norm_maps,
)
from rl_megatron.families.family import Family


def expert_maps(
    hidden: int, width: int, layer: int, expert: int, theirs: str, names: Mapping[str, str]
) -> list[WeightMap]:
    """One expert.

    Args:
        hidden: Size of hidden states.
        width: Size of the intermediate states.
        layer: Number of the layer, from 0.
        expert: Number of the expert in the whole layer, from 0.
        theirs: Prefix of its names in files.
        names: Names of the `gate`, `up` and `down` projections there.
    """
    ours = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
    gate_and_up = tuple(HFTensor(f"{theirs}.{names[name]}.weight", (width, hidden)) for name in ("gate", "up"))
    down = HFTensor(f"{theirs}.{names['down']}.weight", (hidden, width))
    return [
        WeightMap(f"{ours}.linear_fc1.weight", gate_and_up, gate_up(width), over="etp"),
        WeightMap(f"{ours}.linear_fc2.weight", (down,), Chunks(width, dim=1), over="etp"),
    ]


def router_map(hidden: int, num_experts: int, layer: int, theirs: str) -> WeightMap:
    """A layer's router."""
    source = HFTensor(f"{theirs}.gate.weight", (num_experts, hidden))
    return WeightMap(f"decoder.layers.{layer}.mlp.router.weight", (source,), Whole())


PROJECTIONS = {name: f"{name}_proj" for name in ("gate", "up", "down")}


def qwen_settings(config: HFConfig) -> dict[str, Any]:
    """Fields for grouped-query attention and layers of experts, as Qwen's models have them."""
    pattern = [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)]
    return {
        **dense_settings(config),
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": pattern,
        # softmax over all experts and no renormalisation, or over the chosen ones
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def _has_experts(config: HFConfig, layer: int) -> bool:
    is_step = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return is_step and layer not in config.mlp_only_layers


def shared_expert_settings(config: HFConfig) -> Mapping[str, Any]:
    """Fields for shared experts with a gate."""
    return {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _qwen2_moe_settings(config: HFConfig) -> Mapping[str, Any]:
    return {**qwen_settings(config), **shared_expert_settings(config), "add_qkv_bias": config.qkv_bias}


def _qwen3_moe_settings(config: HFConfig) -> Mapping[str, Any]:
    return {**qwen_settings(config), "qk_layernorm": True}


def qwen_maps(config: HFConfig, mixer_maps: Callable[[Any, int], list[WeightMap]]) -> list[WeightMap]:
    """A model with layers of experts without shared ones.

    Args:
        config: Hugging Face config of the model.
        mixer_maps: Function from the config and the number of a layer to the maps of its attention.
    """
    maps = [embedding_map(config)]
    for layer in range(config.num_hidden_layers):
        theirs = f"model.layers.{layer}.mlp"
        maps += norm_maps(config, layer)
        maps += mixer_maps(config, layer)
        if not _has_experts(config, layer):
            maps += mlp_maps(config.hidden_size, config.intermediate_size, f"decoder.layers.{layer}.mlp", theirs)
            continue
        maps.append(router_map(config.hidden_size, config.num_experts, layer, theirs))
        for expert in range(config.num_experts):
            prefix = f"{theirs}.experts.{expert}"
            maps += expert_maps(config.hidden_size, config.moe_intermediate_size, layer, expert, prefix, PROJECTIONS)
    return [*maps, final_norm_map(config)]


def shared_expert_maps(config: HFConfig) -> list[WeightMap]:
    """The shared experts of all layers, and their gates."""
    maps = []
    hidden, width = config.hidden_size, config.shared_expert_intermediate_size
    for layer in range(config.num_hidden_layers):
        if _has_experts(config, layer):
            ours, theirs = f"decoder.layers.{layer}.mlp.shared_experts", f"model.layers.{layer}.mlp"
            maps += mlp_maps(hidden, width, ours, f"{theirs}.shared_expert")
            gate = HFTensor(f"{theirs}.shared_expert_gate.weight", (1, hidden))
            maps.append(WeightMap(f"{ours}.gate_weight", (gate,), Whole()))
    return maps


def _qwen2_moe_maps(config: HFConfig) -> list[WeightMap]:
    attention = partial(attention_maps, has_bias=config.qkv_bias)
    return [*qwen_maps(config, attention), *shared_expert_maps(config)]


def _qwen3_moe_maps(config: HFConfig) -> list[WeightMap]:
    return qwen_maps(config, partial(attention_maps, has_norms=True))


def _mixtral_settings(config: HFConfig) -> Mapping[str, Any]:
    return {
        **dense_settings(config),
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_layer_freq": [1] * config.num_hidden_layers,
    }


def _mixtral_maps(config: HFConfig) -> list[WeightMap]:
    maps = [embedding_map(config)]
    for layer in range(config.num_hidden_layers):
        theirs = f"model.layers.{layer}.block_sparse_moe"
        maps += norm_maps(config, layer)
        maps += attention_maps(config, layer)
        maps.append(router_map(config.hidden_size, config.num_local_experts, layer, theirs))
        for expert in range(config.num_local_experts):
            prefix, names = f"{theirs}.experts.{expert}", {"gate": "w1", "up": "w3", "down": "w2"}
            maps += expert_maps(config.hidden_size, config.intermediate_size, layer, expert, prefix, names)
    return [*maps, final_norm_map(config)]


QWEN2_MOE = Family(_qwen2_moe_settings, _qwen2_moe_maps, head_dim)
QWEN3_MOE = Family(_qwen3_moe_settings, _qwen3_moe_maps, head_dim)
MIXTRAL = Family(_mixtral_settings, _mixtral_maps, head_dim)
