"""Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5 and Mixtral.

Qwen3-Next and Qwen3.5 have linear attention in most layers, gated attention in the others, and experts with a gated
shared one, or in dense models of Qwen3.5 an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rl_core.facts.hf_config import HFConfig
from rl_megatron.conversion.splits import Blocks, Chunks, Whole
from rl_megatron.conversion.weight_map import HFTensor, WeightMap
from rl_megatron.families import dense
from rl_megatron.families.supported import LINEAR_ATTENTION


def routed_maps(
    config: HFConfig,
    layer: int,
    num_experts: int,
    width: int,
    theirs: str,
    names: Mapping[str, str] = dense.PROJECTIONS,
) -> list[WeightMap]:
    """Return the maps of a layer's router and of the experts that it chooses from.

    Args:
        config: Hugging Face config of the model.
        layer: Number of the layer, from 0.
        num_experts: Experts of the layer.
        width: Size of an expert's intermediate states.
        theirs: Prefix of the layer's names in files.
        names: Names of the `gate`, `up` and `down` projections there.
    """
    ours, hidden = f"decoder.layers.{layer}.mlp", config.hidden_size
    maps = [dense.single_map(f"{ours}.router.weight", f"{theirs}.gate.weight", (num_experts, hidden), Whole())]
    for expert in range(num_experts):
        prefixes = f"{ours}.experts.local_experts.{expert}", f"{theirs}.experts.{expert}"
        maps += dense.mlp_maps(hidden, width, *prefixes, names=names, over="etp")
    return maps


def _qwen_settings(config: HFConfig, **further: Any) -> dict[str, Any]:
    fields = config.to_dict()
    return {
        **dense.dense_settings(config),
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(_has_experts(config, layer)) for layer in range(config.num_hidden_layers)],
        # Softmax is over all experts without renormalisation, or over the chosen ones.
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", True),
        **further,
    }


def _has_experts(config: HFConfig, layer: int) -> bool:
    fields = config.to_dict()
    is_step = config.num_experts > 0 and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0
    return is_step and layer not in fields.get("mlp_only_layers", ())


def _qwen_maps(
    config: HFConfig, mixer_maps: Callable[[Any, int], list[WeightMap]], *, has_shared: bool = False
) -> list[WeightMap]:
    """Return the maps of a model with layers of experts.

    Args:
        config: Hugging Face config of the model.
        mixer_maps: Function from the config and the number of a layer to the maps of its attention.
        has_shared: True if layers of experts have a shared one.
    """

    def layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
        theirs = f"model.layers.{layer}.mlp"
        if _has_experts(config, layer):
            mlp = routed_maps(config, layer, config.num_experts, config.moe_intermediate_size, theirs)
        else:
            mlp = dense.mlp_maps(config.hidden_size, config.intermediate_size, f"decoder.layers.{layer}.mlp", theirs)
        return [*mixer_maps(config, layer), *mlp]

    return [*dense.model_maps(config, layer_maps), *(_shared_expert_maps(config) if has_shared else ())]


def _shared_expert_settings(config: HFConfig) -> Mapping[str, Any]:
    size = config.shared_expert_intermediate_size
    return {"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": True}


def _shared_expert_maps(config: HFConfig) -> list[WeightMap]:
    """Return the maps of the shared experts of all layers, and of their gates."""
    maps = []
    hidden, width = config.hidden_size, config.shared_expert_intermediate_size
    for layer in range(config.num_hidden_layers):
        if _has_experts(config, layer):
            ours, theirs = f"decoder.layers.{layer}.mlp.shared_experts", f"model.layers.{layer}.mlp"
            maps += dense.mlp_maps(hidden, width, ours, f"{theirs}.shared_expert")
            maps.append(
                dense.single_map(f"{ours}.gate_weight", f"{theirs}.shared_expert_gate.weight", (1, hidden), Whole())
            )
    return maps


def _gated_settings(config: HFConfig) -> Mapping[str, Any]:
    """Return the fields for linear attention in most layers and gated attention in the others."""
    same = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "linear_attention_freq": [int(kind == LINEAR_ATTENTION) for kind in config.layer_types],
        **{f"linear_{name}": getattr(config, f"linear_{name}") for name in same},
    }


def _mixer_maps(config: HFConfig, layer: int, *, is_by_head: bool) -> list[WeightMap]:
    """Return the maps of a layer's attention, linear or gated.

    Args:
        config: Hugging Face config of the model.
        layer: Number of the layer, from 0.
        is_by_head: True if the inputs of linear attention are in one tensor, head by head; False if each has its own.
    """
    if config.layer_types[layer] != LINEAR_ATTENTION:
        return dense.attention_maps(config, layer, has_norms=True, has_gates=True)
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.linear_attn"
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    projected: dict[str, tuple[int, ...]]
    if is_by_head:
        projected = {"in_proj_qkvz": (2 * (keys + values),), "in_proj_ba": (2 * heads,)}
    else:
        projected = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,)}
        projected |= {"in_proj_b": (heads,), "in_proj_a": (heads,)}
    inputs = tuple(HFTensor(f"{theirs}.{name}.weight", (sum(rows), hidden)) for name, rows in projected.items())
    kernel = (2 * keys + values, 1, config.linear_conv_kernel_dim)
    norm = (config.linear_value_head_dim,)
    output = Chunks(values, dim=1)
    return [
        WeightMap(f"{ours}.in_proj.weight", inputs, Blocks(tuple(projected.values()))),
        dense.single_map(f"{ours}.conv_weight", f"{theirs}.conv1d.weight", kernel, Blocks(((keys, keys, values),))),
        dense.single_map(f"{ours}.A_log", f"{theirs}.A_log", (heads,), Chunks(heads)),
        dense.single_map(f"{ours}.dt_bias", f"{theirs}.dt_bias", (heads,), Chunks(heads)),
        dense.single_map(f"{ours}.norm_weight", f"{theirs}.norm.weight", norm, Whole()),
        dense.single_map(f"{ours}.out_proj.weight", f"{theirs}.out_proj.weight", (hidden, values), output),
    ]


def _qwen3_5_layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    mixer = _mixer_maps(config, layer, is_by_head=False)
    return [*mixer, *dense.mlp_maps(config.hidden_size, config.intermediate_size, ours, theirs)]


def _mixtral_settings(config: HFConfig) -> Mapping[str, Any]:
    return dense.dense_settings(
        config,
        num_moe_experts=config.num_local_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.intermediate_size,
        moe_layer_freq=[1] * config.num_hidden_layers,
    )


def _mixtral_maps(config: HFConfig) -> list[WeightMap]:
    def layer_maps(config: HFConfig, layer: int) -> list[WeightMap]:
        theirs, names = f"model.layers.{layer}.block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
        experts = routed_maps(config, layer, config.num_local_experts, config.intermediate_size, theirs, names)
        return [*dense.attention_maps(config, layer), *experts]

    return dense.model_maps(config, layer_maps)


QWEN2_MOE = dense.Family(
    lambda config: _qwen_settings(config, **_shared_expert_settings(config), add_qkv_bias=config.qkv_bias),
    lambda config: _qwen_maps(config, partial(dense.attention_maps, has_bias=config.qkv_bias), has_shared=True),
    dense.head_dim,
)
QWEN3_MOE = dense.Family(
    partial(_qwen_settings, qk_layernorm=True),
    partial(_qwen_maps, mixer_maps=partial(dense.attention_maps, has_norms=True)),
    dense.head_dim,
)
QWEN3_NEXT = dense.Family(
    lambda config: {**_qwen_settings(config), **_shared_expert_settings(config), **_gated_settings(config)},
    partial(_qwen_maps, mixer_maps=partial(_mixer_maps, is_by_head=True), has_shared=True),
    dense.partial_rotary_dim,
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    weights=partial(_qwen_maps, mixer_maps=partial(_mixer_maps, is_by_head=False), has_shared=True),
    is_linear_attention_by_head=False,
)
QWEN3_5 = dense.Family(
    lambda config: dense.dense_settings(config, **_gated_settings(config)),
    lambda config: dense.model_maps(config, _qwen3_5_layer_maps),
    dense.partial_rotary_dim,
    is_linear_attention_by_head=False,
)
MIXTRAL = dense.Family(_mixtral_settings, _mixtral_maps, dense.head_dim)
