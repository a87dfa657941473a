"""Megatron's config of a model, from Hugging Face's and the backend's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from transformers import PreTrainedConfig

from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.families.rotary import scaling_fields
from rl_megatron.families.supported import architecture_problems, fusion_problem, refuse
from rl_megatron.model.layers import has_transformer_engine
from rl_megatron.transformer_fields import FUSIONS, ON_CUDA, PASSED, WITH_TE


def has_engine_layers(backend: MegatronConfig, *, is_cuda: bool, has_adapters: bool) -> bool:
    """Return whether a model is built of Transformer Engine's layers.

    Raises:
        ValueError: If it must be, and cannot.
    """
    # The norm within a layer of Transformer Engine's hides the input that an adapter needs.
    has_te = is_cuda and backend.transformer_engine is not False and has_transformer_engine() and not has_adapters
    if backend.transformer_engine and not has_te:
        raise ValueError(
            "megatron_cfg.transformer_engine=true, but it is not installed, the run is on cpu, or the model has "
            "adapters; install rl-megatron[te], or leave transformer_engine out"
        )
    return has_te


def transformer_config(
    hf: PreTrainedConfig,
    backend: MegatronConfig,
    *,
    dtype: torch.dtype,
    is_cuda: bool,
    has_te: bool,
    recompute: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's config of the model.

    Args:
        hf: Hugging Face config of the model.
        backend: Settings of the backend.
        dtype: Dtype of parameters and of tensors that travel between pipeline ranks.
        is_cuda: True if the model runs on GPUs.
        has_te: True if the layers are Transformer Engine's.
        recompute: Fields that choose what the backward pass computes again; None if it is nothing.

    Raises:
        ValueError: If the model does not fit the family, or the layout does not fit the model.
    """
    family = dict(family_of(hf).settings(hf))
    if "moe_layer_freq" in family and not any(family["moe_layer_freq"]):
        family = {name: value for name, value in family.items() if not name.startswith(("moe_", "num_moe"))}
    refuse(next(architecture_problems(hf.to_dict(), backend, family), None))
    has_experts = "num_moe_experts" in family
    # The driver sets this for every backend.
    if backend.moe_router_replay and not has_experts:
        raise ValueError(
            f"megatron_cfg.moe_router_replay=true, but the model ({hf.model_type}) has no experts; set it to false"
        )
    kind = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    settings = {
        **family,
        **_parallel_fields(backend),
        **(recompute or {}),
        **(_fp8_fields(backend, has_te) if backend.fp8_cfg.enabled else {}),
        **(_expert_fields(backend, is_cuda=is_cuda, has_te=has_te) if has_experts else {}),
        **fusions(hf, family, backend, is_cuda=is_cuda, has_te=has_te),
        "persist_layer_norm": has_te,
        "attention_softmax_in_fp32": True,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "perform_initialization": False,
        # Losses come divided by global totals, so that gradients are summed and never averaged.
        "calculate_per_token_loss": True,
        # Buffers of overlapped products are set up over sockets: NCCL would keep memory of each GPU for it.
        "tp_comm_bootstrap_backend": "gloo",
        **_further_fields(backend, is_cuda=is_cuda, has_te=has_te),
    }
    try:
        config = kind(**settings)
    except (AssertionError, ValueError) as error:
        if not backend.megatron_kwargs:
            raise
        # Megatron itself checks the fields that the user chose.
        raise ValueError(
            f"megatron_cfg.megatron_kwargs {backend.megatron_kwargs} does not fit the model or the layout: {error}"
        ) from error
    # Megatron derives the number of virtual stages from the layout; the process groups are made for the key's.
    stages = config.virtual_pipeline_model_parallel_size
    if stages != backend.virtual_pipeline_model_parallel_size:
        raise ValueError(
            f"megatron_cfg.megatron_kwargs.pipeline_model_parallel_layout has {stages} stages for each pipeline rank; "
            "set megatron_cfg.virtual_pipeline_model_parallel_size to that"
        )
    if not config.multi_latent_attention:
        refuse(fusion_problem(hf.to_dict(), {"apply_rope_fusion": config.apply_rope_fusion}))
        # Megatron's attention looks for the scales of the rotary embedding in attributes that are not fields.
        vars(config).update(scaling_fields(hf))
    return config


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
    # Megatron takes one of two fused activations; only its own multiplies by the weights of experts as well.
    has_silu = family.get("activation_func") is F.silu
    has_te_activation = has_te and has_silu and not has_experts and not asks("bias_activation_fusion")
    # Megatron fuses the activations of gpt-oss and of most families, but not the approximate GELU of Gemma.
    fits_activation = has_silu or family.get("activation_func") is quick_gelu
    # Megatron calls the kernel for latent attention experimental; `megatron_kwargs` can turn it on.
    is_latent = family.get("multi_latent_attention", False)
    fits_rope = not is_latent and fusion_problem(hf.to_dict(), {"apply_rope_fusion": True}) is None
    # The fused router chooses experts itself, and not in float64.
    fits_router = not backend.moe_router_replay and backend.moe_router_dtype == "fp32"
    return {
        "apply_rope_fusion": has_te and fits_rope,
        "bias_activation_fusion": is_cuda and fits_activation and not asks("use_te_activation_func", has_te_activation),
        # Megatron's grouped experts cannot have biases together with this fusion.
        "bias_dropout_fusion": is_cuda and not (has_experts and family.get("add_bias_linear")),
        "gradient_accumulation_fusion": has_te and has_gradient_accumulation(),
        "masked_softmax_fusion": False,
        "moe_permute_fusion": has_te and has_experts,
        "moe_router_fusion": has_te and has_experts and fits_router,
        "use_te_activation_func": has_te_activation,
    }


def has_gradient_accumulation() -> bool:
    """Return whether apex's extension is installed, which lets matrix products add to gradients in place. Megatron's
    output layer needs it also among layers of Transformer Engine."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _parallel_fields(backend: MegatronConfig) -> dict[str, Any]:
    tensor, virtual = backend.tensor_model_parallel_size, backend.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": backend.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_first_pipeline_stage": backend.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": backend.num_layers_in_last_pipeline_stage,
        "context_parallel_size": backend.context_parallel_size,
        "expert_model_parallel_size": backend.expert_model_parallel_size,
        "expert_tensor_parallel_size": backend.expert_tensor_parallel_size,
        "sequence_parallel": backend.sequence_parallel and tensor > 1,
        "variable_seq_lengths": True,
        # The default cannot take ranks with different numbers of tokens; it is checked for models without experts too.
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }


def _fp8_fields(backend: MegatronConfig, has_te: bool) -> dict[str, Any]:
    if not has_te:
        raise ValueError(
            "megatron_cfg.fp8_cfg.enabled needs Transformer Engine on CUDA, and transformer_engine is not installed "
            "or false, the run is on cpu, or the model has adapters; install rl-megatron[te], or set "
            "fp8_cfg.enabled=false"
        )
    return {"fp8": backend.fp8_cfg.fp8, "fp8_recipe": backend.fp8_cfg.fp8_recipe}


def _expert_fields(backend: MegatronConfig, *, is_cuda: bool, has_te: bool) -> dict[str, Any]:
    if backend.moe_token_dispatcher_type == "flex" and not (is_cuda and importlib.util.find_spec("deep_ep")):
        raise ValueError(
            "megatron_cfg.moe_token_dispatcher_type=flex needs DeepEP on CUDA, and deep_ep is not installed or the "
            "run is on cpu; install it, or set alltoall"
        )
    return {
        "moe_token_dispatcher_type": backend.moe_token_dispatcher_type,
        "moe_grouped_gemm": has_te,
        "moe_router_dtype": backend.moe_router_dtype,
        "moe_router_load_balancing_type": backend.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": backend.moe_aux_loss_coeff,
        "moe_router_bias_update_rate": backend.moe_router_bias_update_rate,
    }


def _further_fields(backend: MegatronConfig, *, is_cuda: bool, has_te: bool) -> dict[str, Any]:
    fields = dict(backend.megatron_kwargs)
    for name, value in fields.items():
        if name not in PASSED:
            raise ValueError(
                f"megatron_cfg.megatron_kwargs.{name} cannot be set: it follows from the model, or is not a field of "
                "Megatron's TransformerConfig. Leave it out"
            )
        if name in FUSIONS and value is False:
            continue
        if (name in ON_CUDA and not is_cuda) or (name in WITH_TE and not has_te):
            needed = "CUDA" if name in ON_CUDA else "layers of Transformer Engine"
            raise ValueError(
                f"megatron_cfg.megatron_kwargs.{name} needs {needed}: the run is on cpu, Transformer Engine is not "
                "installed or not used, or the model has adapters; leave it out"
            )
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    return fields
