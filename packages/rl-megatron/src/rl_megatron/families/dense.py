"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3, and the settings and maps that other families share with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from transformers import PreTrainedConfig

from rl_core.facts.hf_config import HFConfig
from rl_megatron.conversion.splits import Chunks, QueryKeyValue, Split, Vocabulary, Whole, gate_up
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families.supported import SLIDING_ATTENTION, activation_problem, bias_problem, refuse, window_problem

NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
PROJECTIONS = {name: f"{name}_proj" for name in ("gate", "up", "down")}


@dataclass(frozen=True)
class Family:
    """The settings and weight maps that Megatron needs to build and load a family.

    Args:
        settings: Function from the Hugging Face config to fields of Megatron's `TransformerConfig` (of
            `MLATransformerConfig` if `multi_latent_attention` is among them).
        weights: Function from the Hugging Face config to the maps of all weights of the whole model except its head.
        rotary_dim: Function from the Hugging Face config to the dims of a head that rotary embedding turns.
        embedding_scale: Function from the Hugging Face config to the number that embeddings are multiplied by; None if
            there is none.
        has_output_norms: True if the outputs of attention and of the MLP are normed before they are added
            (`self_attn_bda.norm`, `mlp_bda.norm`).
        is_linear_attention_by_head: True if the inputs of linear attention are in one tensor, head by head.
    """

    settings: Callable[[PreTrainedConfig], Mapping[str, Any]]
    weights: Callable[[PreTrainedConfig], list[WeightMap]]
    rotary_dim: Callable[[PreTrainedConfig], int]
    embedding_scale: Callable[[PreTrainedConfig], float] | None = None
    has_output_norms: bool = False
    is_linear_attention_by_head: bool = True


def head_dim(config: HFConfig) -> int:
    """Return the dims of one attention head."""
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)


def partial_rotary_dim(config: HFConfig) -> int:
    """Return the dims of a head that are rotated in a family with `partial_rotary_factor`."""
    return int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def common_settings(config: HFConfig) -> dict[str, Any]:
    """Return the fields of Megatron's config that all families share: RMS norm, SwiGLU, no biases."""
    fields = config.to_dict()
    refuse(activation_problem(fields))
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        # A model whose every layer has experts may have no other size.
        "ffn_hidden_size": fields.get("intermediate_size") or fields["moe_intermediate_size"],
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": fields.get("attention_dropout") or 0.0,
        "hidden_dropout": 0.0,
    }


def dense_settings(config: HFConfig, **further: Any) -> dict[str, Any]:
    """Return the fields for grouped-query attention and one MLP, without biases.

    Args:
        config: Hugging Face config of the model.
        further: Further fields of the family.
    """
    refuse(bias_problem(config.to_dict()))
    return {**grouped_query_settings(config), **further}


def grouped_query_settings(config: HFConfig) -> dict[str, Any]:
    """Return the fields for grouped-query attention, with or without biases."""
    settings = config.to_dict()
    common = common_settings(config)
    kinds = settings.get("layer_types") or []
    refuse(window_problem(settings))
    is_sliding = SLIDING_ATTENTION in kinds if kinds else settings.get("use_sliding_window", True)
    window = settings.get("sliding_window")
    return {
        **common,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        # Numbers of visible tokens before and after each token, and the layers that do not see all tokens.
        "window_size": (window - 1, 0) if window and is_sliding else None,
        "window_attn_skip_freq": [int(kind == SLIDING_ATTENTION) for kind in kinds] or None,
    }


def single_map(target: str, source: str, shape: tuple[int, ...], split: Split) -> WeightMap:
    """Return the map of a parameter that is made of one Hugging Face tensor."""
    return WeightMap(target, (HFTensor(source, shape),), split)


def model_maps(
    config: HFConfig, layer_maps: Callable[[Any, int], list[WeightMap]], norms: Mapping[str, str] = NORMS
) -> list[WeightMap]:
    """Return the maps of a whole model except its head: the embedding, the layers with their norms, and the last norm.

    Args:
        config: Hugging Face config of the model.
        layer_maps: Function from the config and the number of a layer to the maps of its other weights.
        norms: Name of each norm of a layer in Megatron, to its name in files.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = "embedding.word_embeddings.weight"
    maps = [single_map(embedding, "model.embed_tokens.weight", (vocab, hidden), Vocabulary(vocab))]
    for layer in range(config.num_hidden_layers):
        for ours, theirs in norms.items():
            target, source = f"decoder.layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"
            maps.append(single_map(target, source, (hidden,), Whole()))
        maps += layer_maps(config, layer)
    return [*maps, single_map("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), Whole())]


def attention_maps(
    config: HFConfig,
    layer: int,
    *,
    has_bias: bool = False,
    has_output_bias: bool = False,
    has_norms: bool = False,
    has_gates: bool = False,
) -> list[WeightMap]:
    """Return the maps of grouped-query attention.

    Args:
        config: Hugging Face config of the model.
        layer: Number of the layer, from 0.
        has_bias: True if queries, keys and values have biases.
        has_output_bias: True if the output has biases.
        has_norms: True if the heads of queries and keys are normed.
        has_gates: True if the heads' outputs have gates, which are rows of the queries' matrix.
    """
    dim, hidden = head_dim(config), config.hidden_size
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    split = QueryKeyValue(config.num_attention_heads, config.num_key_value_heads, dim, has_gates)
    width, shared = config.num_attention_heads * dim, config.num_key_value_heads * dim
    rows = {"q": 2 * width if has_gates else width, "k": shared, "v": shared}
    sources = tuple(HFTensor(f"{theirs}.{name}_proj.weight", (count, hidden)) for name, count in rows.items())
    output = single_map(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", (hidden, width), Chunks(width, dim=1))
    maps = [WeightMap(f"{ours}.linear_qkv.weight", sources, split), output]
    if has_output_bias:
        maps.append(single_map(f"{ours}.linear_proj.bias", f"{theirs}.o_proj.bias", (hidden,), Whole()))
    if has_bias:
        biases = tuple(HFTensor(f"{theirs}.{name}_proj.bias", (count,)) for name, count in rows.items())
        maps.append(WeightMap(f"{ours}.linear_qkv.bias", biases, split))
    if has_norms:
        for name in ("q", "k"):
            norm = single_map(f"{ours}.{name}_layernorm.weight", f"{theirs}.{name}_norm.weight", (dim,), Whole())
            maps.append(norm)
    return maps


def mlp_maps(
    hidden: int,
    width: int,
    ours: str,
    theirs: str,
    *,
    names: Mapping[str, str] = PROJECTIONS,
    over: Literal["tp", "etp"] = "tp",
) -> list[WeightMap]:
    """Return the maps of a gated MLP.

    Args:
        hidden: Size of hidden states.
        width: Size of the intermediate states.
        ours: Prefix of the names in Megatron.
        theirs: Prefix of the names in files.
        names: Names of the `gate`, `up` and `down` projections in files.
        over: Ranks that share it: `etp` for an expert.
    """
    gate_and_up = tuple(HFTensor(f"{theirs}.{names[name]}.weight", (width, hidden)) for name in ("gate", "up"))
    down = HFTensor(f"{theirs}.{names['down']}.weight", (hidden, width))
    return [
        WeightMap(f"{ours}.linear_fc1.weight", gate_and_up, gate_up(width), over=over),
        WeightMap(f"{ours}.linear_fc2.weight", (down,), Chunks(width, dim=1), over=over),
    ]


def _dense_maps(config: HFConfig, *, has_bias: bool = False, has_norms: bool = False) -> list[WeightMap]:
    def layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
        ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        attention = attention_maps(config, layer, has_bias=has_bias, has_norms=has_norms)
        return [*attention, *mlp_maps(config.hidden_size, config.intermediate_size, ours, theirs)]

    return model_maps(config, layer_maps)


LLAMA = Family(dense_settings, _dense_maps, head_dim)
MISTRAL = LLAMA
QWEN2 = Family(partial(dense_settings, add_qkv_bias=True), partial(_dense_maps, has_bias=True), head_dim)
QWEN3 = Family(partial(dense_settings, qk_layernorm=True), partial(_dense_maps, has_norms=True), head_dim)
