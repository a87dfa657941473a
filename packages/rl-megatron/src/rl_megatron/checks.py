"""Checks of this backend's settings that need no engine, run before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.devices import DEVICES
from rl_core.model_config import local_hf_config, num_experts_of, optimizer_problems
from rl_core.optimizer_arguments import OF_WHOLE_PARAMETERS
from rl_core.run_config import RunConfig
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.rope import fusion_problem, rope_problem
from rl_megatron.field_checks import check_kwargs, without_pipeline
from rl_megatron.transformer_fields import RECOMPUTED_WITH_TE

EXPERTS_PROBLEM = Problem(
    "lora_cfg.target_parameters",
    "must be empty because rl-megatron adds adapters to linear layers only, not to experts",
    remedy="Leave it empty, or train with dtensor_cfg instead of megatron_cfg",
    feature="adapters of experts",
)
"""The refusal of `lora_cfg.target_parameters`."""


def check_layout(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings of the layout that have no effect, or that Megatron does not run together."""
    backend: MegatronConfig = section.megatron_cfg
    if backend.sequence_parallel and backend.tensor_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.sequence_parallel",
            f"needs tensor parallelism, but {KEY}.tensor_model_parallel_size is 1",
            remedy=f"Set {KEY}.tensor_model_parallel_size=2 or more, or this key to false",
        )
    if backend.pipeline_model_parallel_size == 1:
        for name in (
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        ):
            if getattr(backend, name) is not None:
                yield without_pipeline(f"{KEY}.{name}")
    yield from _check_experts(backend)
    if backend.fixed_length_microbatches is True and not section.sequence_packing.enabled:
        yield Problem(
            f"{KEY}.fixed_length_microbatches",
            "needs packed microbatches, but sequence_packing.enabled is false",
            remedy="Set sequence_packing.enabled=true, or this key to auto",
        )


def check_shape(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the sizes of the layout that do not divide the model, if the model's config is on this machine."""
    backend: MegatronConfig = section.megatron_cfg
    model = local_hf_config(section)
    tensor = backend.tensor_model_parallel_size
    shared = ("num_attention_heads", "linear_num_key_heads", "intermediate_size")
    experts = num_experts_of(model)
    for name, size, what, count in (
        *(("tensor_model_parallel_size", tensor, part, model.get(part)) for part in shared),
        ("expert_model_parallel_size", backend.expert_model_parallel_size, "experts", experts),
    ):
        if count and count % size:
            reason = f"does not divide the model's {what} ({count})"
            yield Problem(f"{KEY}.{name}", reason, got=size, remedy="Set it to a divisor")
            return
    num_heads = num_key_heads(model)
    if num_heads and num_heads % tensor and tensor % num_heads:
        yield key_heads_problem(tensor, num_heads)
        return
    if model and not experts and backend.expert_model_parallel_size > 1:
        yield Problem(
            f"{KEY}.expert_model_parallel_size",
            "must be 1 because this model has no experts",
            got=backend.expert_model_parallel_size,
            remedy="Set it to 1",
        )
    layers = model.get("num_hidden_layers", 0)
    stages = backend.pipeline_model_parallel_size * (backend.virtual_pipeline_model_parallel_size or 1)
    if layers and stages > layers and "pipeline_model_parallel_layout" not in backend.megatron_kwargs:
        yield Problem(
            f"{KEY}.pipeline_model_parallel_size",
            f"results in {stages} pipeline stages (pipeline_model_parallel_size x "
            f"virtual_pipeline_model_parallel_size), but the model has only {layers} layers",
            got=backend.pipeline_model_parallel_size,
            remedy=f"Use at most {layers} stages",
        )


def check_rope(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield a rotary embedding that Megatron's layers do not compute, if the model's config is on this machine."""
    fields = local_hf_config(section)
    if problem := rope_problem(fields):
        yield problem.at("model_name")
    if problem := fusion_problem(fields, section.megatron_cfg.megatron_kwargs):
        yield problem


def key_heads_problem(size: int, num_heads: int) -> Problem:
    """Return the problem of a number of tensor-parallel ranks that does not fit the model's key-value heads."""
    return Problem(
        f"{KEY}.tensor_model_parallel_size",
        f"neither divides the model's num_key_value_heads ({num_heads}) nor is a multiple of it",
        got=size,
        remedy="Set it to a divisor or a multiple",
    )


def check_device(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings that no kernel of the run's device computes."""
    backend: MegatronConfig = section.megatron_cfg
    name = config.cluster.device
    yield from optimizer_problems(section, OF_WHOLE_PARAMETERS, DEVICES.get(name))
    if name not in DEVICES or DEVICES[name].kernels == "cuda":  # auto may still become either
        return
    if backend.fp8_cfg.enabled:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            f"needs Transformer Engine and a GPU, but cluster.device is {name}",
            remedy="Set this key to false",
        )
    elif backend.transformer_engine:
        yield Problem(
            f"{KEY}.transformer_engine",
            f"needs a GPU, but cluster.device is {name}",
            remedy="Remove this key, or set it to false",
        )
    if backend.moe_token_dispatcher_type == "flex":
        yield Problem(
            f"{KEY}.moe_token_dispatcher_type",
            f"needs DeepEP and a GPU, but cluster.device is {name}",
            got="flex",
            remedy="Set it to alltoall",
        )


def check_8_bit(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings that contradict 8-bit matrix products."""
    backend: MegatronConfig = section.megatron_cfg
    if not backend.fp8_cfg.enabled:
        return
    if backend.transformer_engine is False:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            f"needs Transformer Engine, but {KEY}.transformer_engine is false",
            remedy=f"Set {KEY}.transformer_engine to true, or this key to false",
        )


def check_lora(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of adapters on layers that do not support them."""
    if section.lora_cfg.enabled and section.lora_cfg.target_parameters:
        yield EXPERTS_PROBLEM
    if section.lora_cfg.enabled and section.megatron_cfg.fp8_cfg.enabled:
        yield Problem(
            f"{KEY}.fp8_cfg.enabled",
            "needs layers of Transformer Engine, but adapters need layers of megatron-core",
            remedy="Set this key to false, or set lora_cfg.enabled=false",
        )


def check_recompute(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the parts to recompute that have no effect, or that the run's layers do not recompute separately."""
    backend: MegatronConfig = section.megatron_cfg
    key, modules = f"{KEY}.recompute_modules", backend.recompute_modules
    if modules is None:
        return
    if backend.recompute in ("none", "full"):
        remedy = f"Set {KEY}.recompute=selective, or remove this key"
        yield Problem.unused(key, f"with {KEY}.recompute={backend.recompute}", remedy=remedy)
        return
    needing = sorted(RECOMPUTED_WITH_TE.intersection(modules))
    device = config.cluster.device
    is_on_cpu = device in DEVICES and DEVICES[device].kernels != "cuda"
    for is_so, reason in (
        (is_on_cpu, f"cluster.device is {device}"),
        (backend.transformer_engine is False, f"{KEY}.transformer_engine is false"),
        (section.lora_cfg.enabled, "adapters need layers of megatron-core"),
    ):
        if needing and is_so:
            reason = f"needs layers of Transformer Engine for {', '.join(needing)}, but {reason}"
            yield Problem(key, reason, remedy=f"Remove {', '.join(needing)}")
            return


def num_key_heads(model: Mapping[str, Any]) -> int:
    """Key-value heads that are spread over the tensor-parallel ranks; 0 for latent attention, or if it is not known."""
    return 0 if "kv_lora_rank" in model else model.get("num_key_value_heads") or 0


def _check_experts(backend: MegatronConfig) -> Iterable[Problem]:
    tensor, expert_tensor = backend.tensor_model_parallel_size, backend.expert_tensor_parallel_size
    if expert_tensor not in (None, tensor) and backend.expert_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.expert_tensor_parallel_size",
            f"differs from {KEY}.tensor_model_parallel_size ({tensor}) and needs {KEY}.expert_model_parallel_size "
            "above 1, because otherwise Megatron reduces the experts' gradients over the wrong ranks",
            got=expert_tensor,
        )
    has_experts_over_ranks = backend.expert_model_parallel_size > 1
    if has_experts_over_ranks and tensor > 1 and not backend.sequence_parallel:
        yield Problem(
            f"{KEY}.sequence_parallel",
            f"must be true if {KEY}.expert_model_parallel_size and {KEY}.tensor_model_parallel_size are above 1",
            got=False,
            remedy="Set it to true",
        )
    is_balanced = backend.moe_router_load_balancing_type != "none"
    if is_balanced != (backend.moe_aux_loss_coeff > 0):
        yield Problem(
            f"{KEY}.moe_aux_loss_coeff",
            f"does not match {KEY}.moe_router_load_balancing_type, which is {backend.moe_router_load_balancing_type}",
            got=backend.moe_aux_loss_coeff,
            remedy="Set both keys or neither",
        )
    ranks_of_tokens = backend.expert_model_parallel_size * (expert_tensor or tensor)
    if backend.moe_token_dispatcher_type == "flex" and (ranks_of_tokens == 1 or backend.moe_router_dtype != "fp32"):
        yield Problem(
            f"{KEY}.moe_token_dispatcher_type",
            f"needs {KEY}.expert_model_parallel_size or {KEY}.tensor_model_parallel_size above 1, and "
            f"{KEY}.moe_router_dtype=fp32",
            got="flex",
            remedy="Set it to alltoall",
        )
    if backend.moe_per_layer_logging and not is_balanced:
        yield Problem.unused(
            f"{KEY}.moe_per_layer_logging",
            f"with {KEY}.moe_router_load_balancing_type=none, because there is no loss to report",
            remedy=f"Set another {KEY}.moe_router_load_balancing_type, or set this key to false",
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
