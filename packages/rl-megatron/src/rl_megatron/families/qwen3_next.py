"""Qwen3-Next: linear attention in most layers, gated attention in the others, and experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.splits import Blocks, Chunks, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.dense import attention_maps, head_dim
from rl_megatron.families.experts import qwen_maps, qwen_settings, shared_expert_maps, shared_expert_settings
from rl_megatron.families.family import Family
from rl_megatron.families.supported import LINEAR_ATTENTION


def _settings(config: HFConfig) -> Mapping[str, Any]:
    return {
        **qwen_settings(config),
        **shared_expert_settings(config),
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "linear_attention_freq": [int(kind == LINEAR_ATTENTION) for kind in config.layer_types],
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
    }


def _weights(config: HFConfig) -> list[WeightMap]:
    return [*qwen_maps(config, _mixer_maps), *shared_expert_maps(config)]


def _mixer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    if config.layer_types[layer] == LINEAR_ATTENTION:
        return _linear_attention_maps(config, layer)
    return attention_maps(config, layer, has_norms=True, has_gates=True)


def _linear_attention_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.linear_attn"
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    projected = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}

    def entry(name: str, source: str, shape: tuple[int, ...], split: Any) -> WeightMap:
        return WeightMap(f"{ours}.{name}", (HFTensor(f"{theirs}.{source}", shape),), split)

    return [
        WeightMap(
            f"{ours}.in_proj.weight",
            tuple(HFTensor(f"{theirs}.{name}.weight", (count, hidden)) for name, count in projected.items()),
            Blocks(tuple((count,) for count in projected.values())),
        ),
        entry(
            "conv_weight",
            "conv1d.weight",
            (2 * keys + values, 1, config.linear_conv_kernel_dim),
            Blocks(((keys, keys, values),)),
        ),
        entry("A_log", "A_log", (heads,), Chunks(heads)),
        entry("dt_bias", "dt_bias", (heads,), Chunks(heads)),
        entry("norm_weight", "norm.weight", (config.linear_value_head_dim,), Whole()),
        entry("out_proj.weight", "out_proj.weight", (hidden, values), Chunks(values, dim=1)),
    ]


def _rotary_dim(config: HFConfig) -> int:
    return int(head_dim(config) * config.rope_parameters["partial_rotary_factor"])


QWEN3_NEXT = Family(_settings, _weights, _rotary_dim)
