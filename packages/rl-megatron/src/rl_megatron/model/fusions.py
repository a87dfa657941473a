"""Fused kernels that a model is built with, as far as they fit its layers and its other settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from rl_megatron.config import MegatronConfig
from rl_megatron.families.rope import fusion_problem


def fusions(
    hf: PreTrainedConfig, family: Mapping[str, Any], backend: MegatronConfig, *, is_cuda: bool, has_te: bool
) -> dict[str, bool]:
    """Return the fields of Megatron's config that choose fused kernels. `megatron_kwargs` overrides each of them.

    Args:
        hf: Hugging Face config of the model.
        family: Fields of Megatron's config that follow from the model.
        backend: Settings of the backend.
        is_cuda: True if the model runs on GPUs, for which fused functions are compiled.
        has_te: True if the layers are Transformer Engine's, with its kernels.
    """
    has_experts = "num_moe_experts" in family
    asks = backend.megatron_kwargs.get
    # Megatron takes one of two fused activations; only its own multiplies by the weights of experts as well
    has_te_activation = has_te and not has_experts and not asks("bias_activation_fusion")
    return {
        "apply_rope_fusion": has_te and _is_rope_fused(hf, family),
        "bias_activation_fusion": is_cuda and not asks("use_te_activation_func", has_te_activation),
        "bias_dropout_fusion": is_cuda,
        "gradient_accumulation_fusion": has_te and has_gradient_accumulation(),
        "masked_softmax_fusion": False,
        "moe_permute_fusion": has_te and has_experts,
        "moe_router_fusion": has_te and has_experts and routes_fused(backend),
        "use_te_activation_func": has_te_activation,
    }


def has_gradient_accumulation() -> bool:
    """Return whether apex's extension is installed with which matrix products add to gradients in place. Megatron's
    output layer needs it also among layers of Transformer Engine."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def routes_fused(backend: MegatronConfig) -> bool:
    """Return whether the fused router computes what is asked: it chooses experts itself, and not in float64."""
    return not backend.moe_router_replay and backend.moe_router_dtype == "fp32"


def _is_rope_fused(hf: PreTrainedConfig, family: Mapping[str, Any]) -> bool:
    """Of latent attention it is not, as Megatron calls that kernel experimental; `megatron_kwargs` can turn it on."""
    is_latent = family.get("multi_latent_attention", False)
    return not is_latent and fusion_problem(hf.to_dict(), {"apply_rope_fusion": True}) is None
