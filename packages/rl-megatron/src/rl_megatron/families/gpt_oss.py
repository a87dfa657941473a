"""gpt-oss: attention with a sink for each head, windows in every other layer, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.activations import quick_gelu

from rl_core.facts.hf_config import HFConfig
from rl_megatron.conversion.splits import Alternating, Chunks, Split, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families import dense
from rl_megatron.families.supported import activation_alpha_problem, refuse, without_bias_problem


def _settings(config: HFConfig) -> Mapping[str, Any]:
    fields = config.to_dict()
    refuse(without_bias_problem(fields))
    refuse(activation_alpha_problem(fields))
    return {
        **dense.grouped_query_settings(config),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "activation_func_clamp_value": config.swiglu_limit,
        "glu_linear_offset": 1.0,
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_layer_freq": [1] * config.num_hidden_layers,
    }


def _layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    heads, hidden, num_experts = config.num_attention_heads, config.hidden_size, config.num_local_experts
    sinks = dense.single_map(
        f"{ours}.self_attention.core_attention.softmax_offset", f"{theirs}.self_attn.sinks", (heads,), Chunks(heads)
    )
    router = [
        dense.single_map(f"{ours}.mlp.router.{name}", f"{theirs}.mlp.router.{name}", (num_experts, *inner), Whole())
        for name, inner in {"weight": (hidden,), "bias": ()}.items()
    ]
    attention = dense.attention_maps(config, layer, has_bias=True, has_output_bias=True)
    return [*attention, sinks, *router, *_expert_maps(config, f"{ours}.mlp", f"{theirs}.mlp.experts")]


def _expert_maps(config: HFConfig, ours: str, theirs: str) -> list[WeightMap]:
    """Return the maps of a layer's experts, which are stacked in files, with the inputs of each matrix first."""
    hidden, width = config.hidden_size, config.intermediate_size
    tensors: dict[str, tuple[str, tuple[int, ...], Split]] = {
        "linear_fc1.weight": ("gate_up_proj", (hidden, 2 * width), Alternating(width)),
        "linear_fc1.bias": ("gate_up_proj_bias", (2 * width,), Alternating(width)),
        "linear_fc2.weight": ("down_proj", (width, hidden), Chunks(width, dim=1)),
        "linear_fc2.bias": ("down_proj_bias", (hidden,), Whole()),
    }
    num = config.num_local_experts
    return [
        WeightMap(
            f"{ours}.experts.local_experts.{expert}.{target}",
            (HFTensor(f"{theirs}.{name}", (num, *shape), expert, is_transposed=len(shape) > 1),),
            split,
            over="etp",
        )
        for target, (name, shape, split) in tensors.items()
        for expert in range(num)
    ]


GPT_OSS = dense.Family(_settings, lambda config: dense.model_maps(config, _layer_maps), dense.head_dim)
