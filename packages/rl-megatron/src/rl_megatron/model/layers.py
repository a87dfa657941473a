"""The layers that a model is built of: Transformer Engine's if it is installed, local ones otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rl_megatron.families.dense import Family
from rl_megatron.model.attention import GatedAttention, PlacedAttention, RowAttention
from rl_megatron.model.gated_delta_net import GatedDeltaNet
from rl_megatron.model.routing import RowRouter


class RMSNorm(nn.Module):
    """RMS norm as transformers computes it: the mean in float32, the product with the weight in the input's dtype, or
    in float32 if weights are centred at zero.

    Unlike Megatron's wrapper of torch's norm it may be in a sequence-parallel region: its gradient is summed there.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        # Megatron finds gradients to sum over the tensor-parallel ranks by this mark.
        marked: Any = self.weight
        marked.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `[*, hidden]`."""
        wide = hidden.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.is_zero_centered:
            return (normed * (1 + self.weight.float())).to(hidden.dtype)
        return self.weight.to(hidden.dtype) * normed.to(hidden.dtype)


class NormedAdd(nn.Module):
    """A norm of a block's output before it is added to the hidden states, in place of Megatron's function that only
    adds."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that Megatron calls with the output and bias of a block, the hidden states that they are
        added to, and the share of elements to drop."""
        add = get_bias_dropout_add(training, fused)

        def normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            hidden, bias = output
            added: Tensor = add((self.norm(hidden if bias is None else hidden + bias), None), residual, dropout)
            return added

        return normed


class SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, with the weight of their gate on the device of the other weights.

    megatron-core 0.16.1 leaves it on the host.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_weight is not None:
            self.gate_weight.data = self.gate_weight.data.to(torch.cuda.current_device())


def patch_expert_biases(chunk: nn.Module) -> None:
    """Correct the biases of experts in megatron-core 0.16.1.

    It adds them in place to the output of local experts' second projection, which on one rank is a view that autograd
    does not let it change. With sequence parallelism it also sums their gradients over the tensor-parallel ranks, which
    have different experts.
    """
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))
    for name, parameter in chunk.named_parameters():
        if ".experts." in name and ".bias" in name:
            marked: Any = parameter
            marked.sequence_parallel = False


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def block_spec(
    config: TransformerConfig, family: Family, *, has_te: bool, virtual_stage: int | None, has_axes: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline rank, or of one of its virtual stages.

    Args:
        config: Config of Megatron.
        family: Family of the model.
        has_te: True if the layers are Transformer Engine's.
        virtual_stage: Number of the virtual stage; None without them.
        has_axes: True if tokens have three places each (M-RoPE).
    """
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization="RMSNorm", vp_stage=virtual_stage
    )
    adapt_layers(spec, config, has_te=has_te)
    if has_axes:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = PlacedAttention
    if family.has_output_norms:
        for layer in spec.layer_specs:
            add = ModuleSpec(NormedAdd, params={"config": config})
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    if config.linear_attention_freq is not None:
        # Transformer Engine's layers have the norm within the projection that is replaced.
        mixer = {
            "input_layernorm": RMSNorm,
            "self_attention": ModuleSpec(GatedDeltaNet, params={"is_by_head": family.is_linear_attention_by_head}),
        }
        first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
        spec.layer_specs = [
            replace(layer, submodules=replace(layer.submodules, **mixer))
            if config.linear_attention_freq[number]
            else layer
            for number, layer in enumerate(spec.layer_specs, first)
        ]
    return spec


def adapt_layers(spec: TransformerBlockSubmodules, config: TransformerConfig, *, has_te: bool) -> None:
    """Replace the modules of Megatron that are not right here by modules of this package."""
    for layer in spec.layer_specs:
        experts = layer.submodules.mlp.submodules
        if isinstance(experts, MoESubmodules):
            experts.router = RowRouter
            experts.shared_experts.module = SharedExperts
        if config.attention_output_gate:
            layer.submodules.self_attention.module = GatedAttention
        attention = layer.submodules.self_attention.submodules
        if not has_te:
            # Norms may be in a sequence-parallel region, and attention must know packed rows.
            layer.submodules.input_layernorm = RMSNorm
            layer.submodules.pre_mlp_layernorm = RMSNorm
            attention.core_attention = RowAttention
            for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
                if vars(attention).get(name) not in (None, IdentityOp):
                    setattr(attention, name, RMSNorm)
        elif config.context_parallel_size > 1 and (config.window_size is not None or config.softmax_type != "vanilla"):
            # If Transformer Engine passes keys from rank to rank, it supports neither sliding windows nor sinks.
            attention.core_attention = RowAttention
    if not has_te:
        spec.layer_norm = RMSNorm
