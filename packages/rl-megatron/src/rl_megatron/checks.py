"""Checks of this backend's settings that need no engine, run before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.devices import DEVICES
from rl_core.model_config import local_hf_config, num_experts_of
from rl_core.run_config import RunConfig
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.rope import fusion_problem, rope_problem
from rl_megatron.transformer_fields import ON_CUDA, WITH_FP8, WITH_TE

EXPERTS_PROBLEM = (
    "rl-megatron adapts linear layers alone, no experts; leave it empty, or train with dtensor_cfg in place of "
    "megatron_cfg"
)
"""Why `lora_cfg.target_parameters` is refused."""


def check_layout(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Settings of the layout that do nothing, or that Megatron does not run together."""
    backend: MegatronConfig = section.megatron_cfg
    if backend.sequence_parallel and backend.tensor_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.sequence_parallel",
            f"spreads tokens over tensor-parallel ranks, of which there is one; set {KEY}.tensor_model_parallel_size, "
            "or this to false",
        )
    if backend.pipeline_model_parallel_size == 1:
        for name in (
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        ):
            if getattr(backend, name) is not None:
                yield Problem(
                    f"{KEY}.{name}", f"needs more than one pipeline rank; set {KEY}.pipeline_model_parallel_size"
                )
    yield from _check_experts(backend)


def check_shape(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Sizes of the layout that do not divide the model, if the model's config is on this machine."""
    backend: MegatronConfig = section.megatron_cfg
    model = local_hf_config(section)
    tensor = backend.tensor_model_parallel_size
    shared = ("num_attention_heads", "linearnum_key_heads", "intermediate_size")
    experts = num_experts_of(model)
    for name, size, what, count in (
        *(("tensor_model_parallel_size", tensor, part, model.get(part)) for part in shared),
        ("expert_model_parallel_size", backend.expert_model_parallel_size, "experts", experts),
    ):
        if count and count % size:
            yield Problem(f"{KEY}.{name}", f"{size} does not divide the model's {what} ({count}); set it to a divisor")
            return
    num_heads = num_key_heads(model)
    if num_heads and num_heads % tensor and tensor % num_heads:
        yield Problem(f"{KEY}.tensor_model_parallel_size", f"{tensor} {key_heads_problem(num_heads)}")
        return
    if model and not experts and backend.expert_model_parallel_size > 1:
        yield Problem(
            f"{KEY}.expert_model_parallel_size",
            f"is {backend.expert_model_parallel_size} and the model has no experts; set it to 1",
        )
    layers = model.get("num_hidden_layers", 0)
    stages = backend.pipeline_model_parallel_size * (backend.virtual_pipeline_model_parallel_size or 1)
    if layers and stages > layers and "pipeline_model_parallel_layout" not in backend.megatron_kwargs:
        yield Problem(
            f"{KEY}.pipeline_model_parallel_size",
            f"{stages} stages (pipeline_model_parallel_size x virtual_pipeline_model_parallel_size) of {layers} layers "
            f"leave some empty; have at most {layers}",
        )


def check_rope(section: Any, config: RunConfig) -> Iterable[Problem]:
    """A rotary embedding that Megatron's layers do not compute, if the model's config is on this machine."""
    fields = local_hf_config(section)
    problem = rope_problem(fields)
    if problem:
        yield Problem("model_name", problem)
    problem = fusion_problem(fields, section.megatron_cfg.megatron_kwargs)
    if problem:
        yield Problem(f"{KEY}.megatron_kwargs.apply_rope_fusion", problem)


def key_heads_problem(num_heads: int) -> str:
    """The end of a message: a number of tensor-parallel ranks does not fit the model's key-value heads."""
    return (
        f"neither divides the model's num_key_value_heads ({num_heads}) nor is a multiple of it; set it to a divisor "
        "or a multiple"
    )


def check_device(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Settings that no kernel of the run's device computes."""
    backend: MegatronConfig = section.megatron_cfg
    name = config.cluster.device
    if name not in DEVICES or DEVICES[name].kernels == "cuda":  # auto may still become either
        return
    if backend.fp8_cfg.enabled:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            f"needs Transformer Engine and a GPU, and cluster.device is {name}; set this to false",
        )
    elif backend.transformer_engine:
        yield Problem(
            f"{KEY}.transformer_engine", f"needs a GPU, and cluster.device is {name}; leave it out, or set it to false"
        )
    if backend.moe_token_dispatcher_type == "flex":
        yield Problem(
            f"{KEY}.moe_token_dispatcher_type",
            f"'flex' needs DeepEP and a GPU, and cluster.device is {name}; set alltoall",
        )


def check_8_bit(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Settings that 8-bit matrix products contradict."""
    backend: MegatronConfig = section.megatron_cfg
    if not backend.fp8_cfg.enabled:
        return
    if backend.transformer_engine is False:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            f"needs Transformer Engine, and {KEY}.transformer_engine is false; set one of them",
        )


def check_kwargs(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Further fields of Megatron's config that the device or the layers lack, or that do nothing."""
    backend: MegatronConfig = section.megatron_cfg
    device = config.cluster.device
    is_on_cpu = device in DEVICES and DEVICES[device].kernels != "cuda"
    for name in backend.megatron_kwargs:
        problem = None
        if name in ON_CUDA and is_on_cpu:
            problem = f"needs a GPU, and cluster.device is {device}; leave it out"
        elif name in WITH_TE and is_on_cpu:
            problem = f"needs Transformer Engine and a GPU, and cluster.device is {device}; leave it out"
        elif name in WITH_TE and backend.transformer_engine is False:
            problem = f"needs Transformer Engine, and {KEY}.transformer_engine is false; leave one of them out"
        elif name in WITH_TE and section.lora_cfg.enabled:
            problem = (
                "needs layers of Transformer Engine, and adapters need those of megatron-core; leave it out, or set "
                "lora_cfg.enabled to false"
            )
        elif name in WITH_FP8 and not backend.fp8_cfg.enabled:
            problem = f"has no effect without {KEY}.fp8_cfg.enabled=true"
        else:
            problem = _effect_problem(name, backend)
        if problem:
            yield Problem(f"{KEY}.megatron_kwargs.{name}", problem)


def _effect_problem(name: str, backend: MegatronConfig) -> str | None:
    """Why a further field of Megatron's config does nothing or the wrong thing beside other settings; None if it does
    what it says."""
    if name in ("recompute_method", "recompute_num_layers"):
        if not backend.activation_checkpointing or backend.recompute_granularity != "full":
            return f"has no effect without {KEY}.activation_checkpointing=true and {KEY}.recompute_granularity=full"
    elif name in ("deallocate_pipeline_outputs", "pipeline_model_parallel_layout", "batch_p2p_sync"):
        if backend.pipeline_model_parallel_size == 1:
            return f"needs more than one pipeline rank; set {KEY}.pipeline_model_parallel_size"
    elif name == "overlap_p2p_comm_warmup_flush":
        if backend.virtual_pipeline_model_parallel_size is None:
            return f"has no effect without {KEY}.virtual_pipeline_model_parallel_size"
    elif name in ("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"):
        if backend.moe_token_dispatcher_type != "flex":
            return f"has no effect without {KEY}.moe_token_dispatcher_type=flex"
    elif name == "moe_router_fusion":
        if backend.moe_router_replay:
            return f"chooses experts itself, and {KEY}.moe_router_replay is true; leave one of them out"
    elif name == "cp_comm_type" and backend.context_parallel_size == 1:
        return f"has no effect without {KEY}.context_parallel_size above 1"
    return None


def check_lora(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Adapters on layers that do not take them."""
    if section.lora_cfg.enabled and section.lora_cfg.target_parameters:
        yield Problem("lora_cfg.target_parameters", EXPERTS_PROBLEM)
    if section.lora_cfg.enabled and section.megatron_cfg.fp8_cfg.enabled:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            "needs layers of Transformer Engine, and adapters need those of megatron-core; set this to false, or "
            "lora_cfg.enabled to false",
        )


def check_recompute(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Settings of recomputation that do nothing."""
    backend: MegatronConfig = section.megatron_cfg
    defaults = MegatronConfig()
    for name in ("recompute_granularity", "recompute_modules"):
        is_set = getattr(backend, name) != getattr(defaults, name)
        if is_set and not backend.activation_checkpointing:
            yield Problem(f"{KEY}.{name}", f"has no effect without {KEY}.activation_checkpointing=true")
        elif is_set and name == "recompute_modules" and backend.recompute_granularity == "full":
            yield Problem(f"{KEY}.{name}", f"has no effect while {KEY}.recompute_granularity is full; set selective")


def num_key_heads(model: Mapping[str, Any]) -> int:
    """Key-value heads that are spread over the tensor-parallel ranks; 0 for latent attention, or if it is not known."""
    return 0 if "kv_lora_rank" in model else model.get("num_key_value_heads") or 0


def _check_experts(backend: MegatronConfig) -> Iterable[Problem]:
    tensor, expert_tensor = backend.tensor_model_parallel_size, backend.expert_tensor_parallel_size
    if expert_tensor not in (None, tensor) and backend.expert_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.expert_tensor_parallel_size",
            f"{expert_tensor} with {tensor} tensor-parallel ranks needs {KEY}.expert_model_parallel_size above 1: "
            "Megatron reduces the experts' gradients over the wrong ranks otherwise",
        )
    has_experts_over_ranks = backend.expert_model_parallel_size > 1
    if has_experts_over_ranks and tensor > 1 and not backend.sequence_parallel:
        yield Problem(
            f"{KEY}.sequence_parallel",
            f"must be true if {KEY}.expert_model_parallel_size and {KEY}.tensor_model_parallel_size are above 1",
        )
    is_balanced = backend.moe_router_load_balancing_type != "none"
    if is_balanced != (backend.moe_aux_loss_coeff > 0):
        yield Problem(
            f"{KEY}.moe_aux_loss_coeff",
            f"{backend.moe_aux_loss_coeff} with moe_router_load_balancing_type "
            f"{backend.moe_router_load_balancing_type!r}; set both or neither",
        )
    ranks_of_tokens = backend.expert_model_parallel_size * (expert_tensor or tensor)
    if backend.moe_token_dispatcher_type == "flex" and (ranks_of_tokens == 1 or backend.moe_router_dtype != "fp32"):
        yield Problem(
            f"{KEY}.moe_token_dispatcher_type",
            f"'flex' needs {KEY}.expert_model_parallel_size or {KEY}.tensor_model_parallel_size above 1 and "
            f"{KEY}.moe_router_dtype fp32; set alltoall",
        )
    if backend.moe_per_layer_logging and not is_balanced:
        yield Problem(
            f"{KEY}.moe_per_layer_logging",
            f"reports the loss of {KEY}.moe_router_load_balancing_type, which is 'none'; choose another, or set this "
            "to false",
        )


CHECKS = (
    check_layout,
    check_shape,
    check_rope,
    check_recompute,
    check_lora,
    check_8_bit,
    check_device,
    check_kwargs,
)
"""All of them, in the order in which their problems are shown."""
