"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig

from rl_core.hf_config import HFConfig
from rl_megatron.conversion.splits import Chunks, QueryKeyValue, Vocabulary, Whole, gate_up
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.family import Family
from rl_megatron.families.supported import (
    LINEAR_ATTENTION,
    activation_problem,
    bias_problem,
    refuse,
    window_problem,
)


def head_dim(config: HFConfig) -> int:
    """Dims of one attention head."""
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)


def common_settings(config: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's config that all families share: RMS norm, SwiGLU, no biases."""
    refuse(activation_problem(config.to_dict()))
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": config.to_dict().get("attention_dropout") or 0.0,
        "hidden_dropout": 0.0,
    }


def dense_settings(config: HFConfig) -> dict[str, Any]:
    """Fields for grouped-query attention and one MLP, without biases."""
    refuse(bias_problem(config.to_dict()))
    return grouped_query_settings(config)


def grouped_query_settings(config: HFConfig) -> dict[str, Any]:
    """Fields for grouped-query attention, with or without biases."""
    return {
        **common_settings(config),
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "window_size": _window(config),
    }


def embedding_map(config: HFConfig) -> WeightMap:
    """The word embedding."""
    return WeightMap(
        "embedding.word_embeddings.weight",
        (HFTensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),),
        Vocabulary(config.vocab_size),
    )


def final_norm_map(config: HFConfig) -> WeightMap:
    """The norm after the last layer."""
    return WeightMap("decoder.final_layernorm.weight", (HFTensor("model.norm.weight", (config.hidden_size,)),), Whole())


def norm_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    """The two norms of a layer."""
    names = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    return [
        WeightMap(
            f"decoder.layers.{layer}.{ours}.weight",
            (HFTensor(f"model.layers.{layer}.{theirs}.weight", (config.hidden_size,)),),
            Whole(),
        )
        for ours, theirs in names.items()
    ]


def attention_maps(
    config: HFConfig, layer: int, *, has_bias: bool = False, has_norms: bool = False, has_gates: bool = False
) -> list[WeightMap]:
    """Grouped-query attention.

    Args:
        config: Hugging Face config of the model.
        layer: Number of the layer, from 0.
        has_bias: True if queries, keys and values have biases.
        has_norms: True if the heads of queries and keys are normed.
        has_gates: True if the heads' outputs have gates, which are rows of the queries' matrix.
    """
    dim, hidden = head_dim(config), config.hidden_size
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    split = QueryKeyValue(config.num_attention_heads, config.num_key_value_heads, dim, has_gates)
    width, shared = config.num_attention_heads * dim, config.num_key_value_heads * dim
    rows = {"q": 2 * width if has_gates else width, "k": shared, "v": shared}
    maps = [
        WeightMap(
            f"{ours}.linear_qkv.weight",
            tuple(HFTensor(f"{theirs}.{name}_proj.weight", (count, hidden)) for name, count in rows.items()),
            split,
        ),
        WeightMap(
            f"{ours}.linear_proj.weight",
            (HFTensor(f"{theirs}.o_proj.weight", (hidden, width)),),
            Chunks(width, dim=1),
        ),
    ]
    if has_bias:
        sources = tuple(HFTensor(f"{theirs}.{name}_proj.bias", (count,)) for name, count in rows.items())
        maps.append(WeightMap(f"{ours}.linear_qkv.bias", sources, split))
    if has_norms:
        for name in ("q", "k"):
            source = HFTensor(f"{theirs}.{name}_norm.weight", (dim,))
            maps.append(WeightMap(f"{ours}.{name}_layernorm.weight", (source,), Whole()))
    return maps


def mlp_maps(hidden: int, width: int, ours: str, theirs: str) -> list[WeightMap]:
    """A gated MLP.

    Args:
        hidden: Size of hidden states.
        width: Size of the intermediate states.
        ours: Prefix of the names in Megatron.
        theirs: Prefix of the names in files.
    """
    gate_and_up = tuple(HFTensor(f"{theirs}.{name}_proj.weight", (width, hidden)) for name in ("gate", "up"))
    down = HFTensor(f"{theirs}.down_proj.weight", (hidden, width))
    return [
        WeightMap(f"{ours}.linear_fc1.weight", gate_and_up, gate_up(width)),
        WeightMap(f"{ours}.linear_fc2.weight", (down,), Chunks(width, dim=1)),
    ]


def _dense_maps(config: HFConfig, *, has_bias: bool = False, has_norms: bool = False) -> list[WeightMap]:
    maps = [embedding_map(config)]
    for layer in range(config.num_hidden_layers):
        maps += norm_maps(config, layer)
        maps += attention_maps(config, layer, has_bias=has_bias, has_norms=has_norms)
        prefixes = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        maps += mlp_maps(config.hidden_size, config.intermediate_size, *prefixes)
    return [*maps, final_norm_map(config)]


def _window(config: HFConfig) -> tuple[int, int] | None:
    """Numbers of tokens before and after each token that it sees, the same in all layers of softmax attention; None if
    it sees all before it."""
    settings = config.to_dict()
    kinds = set(settings.get("layer_types") or []) - {LINEAR_ATTENTION}
    refuse(window_problem(settings))
    is_sliding = kinds == {"sliding_attention"} if kinds else settings.get("use_sliding_window", True)
    window = settings.get("sliding_window")
    return (window - 1, 0) if window and is_sliding else None


def _qwen2_settings(config: HFConfig) -> Mapping[str, Any]:
    return {**dense_settings(config), "add_qkv_bias": True}


def _qwen3_settings(config: HFConfig) -> Mapping[str, Any]:
    return {**dense_settings(config), "qk_layernorm": True}


def _qwen2_maps(config: PreTrainedConfig) -> list[WeightMap]:
    return _dense_maps(config, has_bias=True)


def _qwen3_maps(config: PreTrainedConfig) -> list[WeightMap]:
    return _dense_maps(config, has_norms=True)


LLAMA = Family(dense_settings, _dense_maps, head_dim)
MISTRAL = LLAMA
QWEN2 = Family(_qwen2_settings, _qwen2_maps, head_dim)
QWEN3 = Family(_qwen3_settings, _qwen3_maps, head_dim)
