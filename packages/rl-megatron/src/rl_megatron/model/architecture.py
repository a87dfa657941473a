"""Megatron's config of a model, from Hugging Face's and the backend's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from transformers import PreTrainedConfig

from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.families.rope import fusion_problem
from rl_megatron.families.rotary import scaling_fields
from rl_megatron.families.supported import architecture_problems, refuse
from rl_megatron.model.fusions import fusions
from rl_megatron.model.layers import has_transformer_engine
from rl_megatron.transformer_fields import FUSIONS, ON_CUDA, WITH_TE


def has_engine_layers(backend: MegatronConfig, *, is_cuda: bool, has_adapters: bool) -> bool:
    """Return whether a model is built of Transformer Engine's layers.

    Raises:
        ValueError: If it must be, and cannot.
    """
    # the norm within a layer of Transformer Engine's hides the input that an adapter needs
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
    """Return the config from which Megatron builds the model.

    Args:
        hf: Hugging Face config of the model.
        backend: Settings of the backend.
        dtype: Dtype of parameters and of what travels between pipeline ranks.
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
    if backend.moe_router_replay and "num_moe_experts" not in family:  # the driver asks this for every backend
        raise ValueError(
            f"megatron_cfg.moe_router_replay=true, but the model ({hf.model_type}) has no experts; set it to false"
        )
    kind = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    settings = {
        **family,
        **_parallel(backend),
        **(recompute or {}),
        **_fp8(backend, has_te),
        **(_experts(backend, is_cuda=is_cuda, has_te=has_te) if "num_moe_experts" in family else {}),
        **fusions(hf, family, backend, is_cuda=is_cuda, has_te=has_te),
        "persist_layer_norm": has_te,
        "attention_softmax_in_fp32": True,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "perform_initialization": False,
        # losses come divided by global totals, so that gradients are summed and never averaged
        "calculate_per_token_loss": True,
        **_further(backend, is_cuda=is_cuda, has_te=has_te),
    }
    try:
        config = kind(**settings)
    except (AssertionError, ValueError) as error:
        if not backend.megatron_kwargs:
            raise
        # Megatron's own checks, of fields that the user chose
        raise ValueError(
            f"megatron_cfg.megatron_kwargs {backend.megatron_kwargs} does not fit the model or the layout: {error}"
        ) from error
    _check_virtual_stages(config, backend)
    if not config.multi_latent_attention:
        _scale_rotary(config, hf)
    return config


def _scale_rotary(config: TransformerConfig, hf: PreTrainedConfig) -> None:
    """Set what Megatron's attention scales the rotary embedding by; it looks for attributes that are not fields."""
    refuse(fusion_problem(hf.to_dict(), {"apply_rope_fusion": config.apply_rope_fusion}))
    vars(config).update(scaling_fields(hf))


def _further(backend: MegatronConfig, *, is_cuda: bool, has_te: bool) -> dict[str, Any]:
    """The fields of `megatron_kwargs`."""
    for name, value in backend.megatron_kwargs.items():
        if name in FUSIONS and value is False:
            continue
        if (name in ON_CUDA and not is_cuda) or (name in WITH_TE and not has_te):
            needed = "CUDA" if name in ON_CUDA else "layers of Transformer Engine"
            raise ValueError(
                f"megatron_cfg.megatron_kwargs.{name} needs {needed}: the run is on cpu, Transformer Engine is not "
                "installed or not used, or the model has adapters; leave it out"
            )
    fields = dict(backend.megatron_kwargs)
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    return fields


def _check_virtual_stages(config: TransformerConfig, backend: MegatronConfig) -> None:
    """Megatron derives the number of virtual stages from the layout; the process groups are made for the key's."""
    if config.virtual_pipeline_model_parallel_size != backend.virtual_pipeline_model_parallel_size:
        raise ValueError(
            f"megatron_cfg.megatron_kwargs.pipeline_model_parallel_layout has "
            f"{config.virtual_pipeline_model_parallel_size} stages for each pipeline rank; set "
            f"megatron_cfg.virtual_pipeline_model_parallel_size to that"
        )


def _parallel(backend: MegatronConfig) -> dict[str, Any]:
    virtual = backend.virtual_pipeline_model_parallel_size
    tensor = backend.tensor_model_parallel_size
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
        # the default cannot take ranks with different numbers of tokens; it is checked for models without experts too
        "moe_token_dispatcher_type": "alltoall",
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }


def _fp8(backend: MegatronConfig, has_te: bool) -> dict[str, Any]:
    settings = backend.fp8_cfg
    if not settings.enabled:
        return {}
    if not has_te:
        raise ValueError(
            "megatron_cfg.fp8_cfg.enabled needs Transformer Engine on CUDA, and transformer_engine is not installed "
            "or false, the run is on cpu, or the model has adapters; install rl-megatron[te], or set "
            "fp8_cfg.enabled=false"
        )
    return {"fp8": settings.fp8, "fp8_recipe": settings.fp8_recipe}


def _experts(backend: MegatronConfig, *, is_cuda: bool, has_te: bool) -> dict[str, Any]:
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
