"""Checks of this backend's settings that need no engine, run before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.devices import DEVICES
from rl_core.model_config import local_hf_config, optimizer_problems
from rl_core.optimizer_arguments import OF_WHOLE_PARAMETERS
from rl_core.run_config import RunConfig
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.supported import architecture_problems
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


def check_architecture(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield what rl-megatron does not train of a model, or of a layout for it, if the model's config is on this
    machine."""
    yield from architecture_problems(local_hf_config(section), section.megatron_cfg)


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
    check_architecture,
    check_recompute,
    check_lora,
    check_8_bit,
    check_device,
    check_kwargs,
)
"""All of them, in the order in which their problems are shown."""
