"""Gemma 3 as a language model: norms before and after each block, and layers that differ in window and rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F

from rl_core.facts.hf_config import HFConfig
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.families import dense
from rl_megatron.families.supported import bias_problem, gemma_problem, refuse

NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}


def _settings(config: HFConfig) -> Mapping[str, Any]:
    fields = config.to_dict()
    refuse(bias_problem(fields))
    refuse(gemma_problem(fields))
    return {
        **dense.grouped_query_settings(config),
        "activation_func": partial(F.gelu, approximate="tanh"),
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
    }


def _layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    attention = dense.attention_maps(config, layer, has_norms=True)
    return [*attention, *dense.mlp_maps(config.hidden_size, config.intermediate_size, ours, theirs)]


GEMMA3 = dense.Family(
    _settings,
    lambda config: dense.model_maps(config, _layer_maps, NORMS),
    dense.head_dim,
    embedding_scale=lambda config: math.sqrt(config.hidden_size),
    has_output_norms=True,
)
