"""The layers that a model is built of: Transformer Engine's if it is installed, local ones otherwise."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rl_megatron.model.attention import GatedAttention, RowAttention
from rl_megatron.model.gated_delta_net import GatedDeltaNet
from rl_megatron.model.norm import RMSNorm
from rl_megatron.model.routing import RowRouter
from rl_megatron.model.shared_experts import SharedExperts


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, *, has_te: bool, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline rank, or of one of its virtual stages."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization="RMSNorm", vp_stage=virtual_stage
    )
    adapt_layers(spec, config, has_te=has_te)
    if config.linear_attention_freq is not None:
        first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
        spec.layer_specs = [
            _with_linear_attention(layer) if config.linear_attention_freq[number] else layer
            for number, layer in enumerate(spec.layer_specs, first)
        ]
    return spec


def _with_linear_attention(layer: ModuleSpec) -> ModuleSpec:
    # Transformer Engine's layers have the norm within the projection that is replaced
    mixer = {"input_layernorm": RMSNorm, "self_attention": ModuleSpec(GatedDeltaNet)}
    return replace(layer, submodules=replace(layer.submodules, **mixer))


def adapt_layers(spec: TransformerBlockSubmodules, config: TransformerConfig, *, has_te: bool) -> None:
    """Put this package's modules in the place of Megatron's that are not right here."""
    for layer in spec.layer_specs:
        experts = layer.submodules.mlp.submodules
        if isinstance(experts, MoESubmodules):
            experts.router = RowRouter
            experts.shared_experts.module = SharedExperts
        if config.attention_output_gate:
            layer.submodules.self_attention.module = GatedAttention
        if not has_te:
            _localise(layer)
        elif config.window_size is not None and config.context_parallel_size > 1:
            # when Transformer Engine passes keys from rank to rank, it does not support sliding windows
            layer.submodules.self_attention.submodules.core_attention = RowAttention
    if not has_te:
        spec.layer_norm = RMSNorm


def _localise(layer: ModuleSpec) -> None:
    """Norms that may lie in a sequence-parallel region, and attention that knows packed rows."""
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = RowAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if vars(attention).get(name) not in (None, IdentityOp):
            setattr(attention, name, RMSNorm)
