"""Checks of this backend's settings that need no engine, run before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.data.microbatch import Batching
from rl_core.devices import DEVICES
from rl_core.facts.optimizer_arguments import OF_WHOLE_PARAMETERS
from rl_core.model_config import local_hf_config, local_whole_config, optimizer_problems
from rl_core.run_config import RunConfig
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.families.supported import architecture_problems, image_problems
from rl_megatron.transformer_fields import FUSIONS, OF_TENSOR_OVERLAP, ON_CUDA, RECOMPUTED_WITH_TE, WITH_FP8, WITH_TE

EXPERTS_PROBLEM = Problem(
    "lora_cfg.target_parameters",
    "must be empty because rl-megatron adds adapters to linear layers only, not to experts",
    remedy="Leave it empty, or train with dtensor_cfg instead of megatron_cfg",
    feature="adapters of experts",
)
"""The refusal of `lora_cfg.target_parameters`."""

DORA_PROBLEM = Problem(
    "lora_cfg.use_dora",
    "is not supported by rl-megatron, which adds adapters to the results of fused layers and does not scale their rows",
    got=True,
    remedy="Set it to false, or train with dtensor_cfg instead of megatron_cfg",
    feature="DoRA adapters",
)
"""The refusal of `lora_cfg.use_dora`."""

QUANTIZATION_PROBLEM = Problem(
    "lora_cfg.base_quantization",
    "is not supported by rl-megatron, whose fused layers compute with weights in the dtype of the model",
    remedy="Remove it, or train with dtensor_cfg instead of megatron_cfg",
    feature="quantised weights under adapters",
)
"""The refusal of `lora_cfg.base_quantization`."""

SEVERAL_PROBLEM = Problem(
    "lora_cfg.max_adapters",
    "is not supported by rl-megatron, whose optimizer holds the parameters that train in one buffer and steps all of "
    "them",
    remedy="Set it to 1, or train with dtensor_cfg instead of megatron_cfg",
    feature="several adapters on one base",
)
"""The refusal of `lora_cfg.max_adapters`."""


def check_layout(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings of the layout that have no effect, or that Megatron does not run together."""
    backend: MegatronConfig = section.megatron_cfg
    if backend.sequence_parallel and backend.tensor_model_parallel_size == 1:
        reason = f"needs tensor parallelism, but {KEY}.tensor_model_parallel_size is 1"
        remedy = f"Set {KEY}.tensor_model_parallel_size=2 or more, or this key to false"
        yield Problem(f"{KEY}.sequence_parallel", reason, remedy=remedy)
    if backend.pipeline_model_parallel_size == 1:
        stages = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        for name in ("virtual_pipeline_model_parallel_size", *stages):
            if getattr(backend, name) is not None:
                yield _without_pipeline(f"{KEY}.{name}")
    yield from _expert_problems(backend)
    if backend.fixed_length_microbatches is True and not section.sequence_packing.enabled:
        reason = "needs packed microbatches, but sequence_packing.enabled is false"
        remedy = "Set sequence_packing.enabled=true, or this key to auto"
        yield Problem(f"{KEY}.fixed_length_microbatches", reason, remedy=remedy)
    if section.sequence_packing.shared_prefixes is True:
        reason = "is not supported by rl-megatron, whose attention kernels take rows that are whole"
        remedy = "Set it to auto or false, or train with dtensor_cfg instead of megatron_cfg"
        yield Problem("sequence_packing.shared_prefixes", reason, got=True, remedy=remedy)


def _expert_problems(backend: MegatronConfig) -> Iterable[Problem]:
    tensor, expert_tensor = backend.tensor_model_parallel_size, backend.expert_tensor_parallel_size
    if expert_tensor not in (None, tensor) and backend.expert_model_parallel_size == 1:
        yield Problem(
            f"{KEY}.expert_tensor_parallel_size",
            f"differs from {KEY}.tensor_model_parallel_size ({tensor}) and needs {KEY}.expert_model_parallel_size "
            "above 1, because otherwise Megatron reduces the experts' gradients over the wrong ranks",
            got=expert_tensor,
        )
    if backend.expert_model_parallel_size > 1 and tensor > 1 and not backend.sequence_parallel:
        reason = f"must be true if {KEY}.expert_model_parallel_size and {KEY}.tensor_model_parallel_size are above 1"
        yield Problem(f"{KEY}.sequence_parallel", reason, got=False, remedy="Set it to true")
    balancing, weight = backend.moe_router_load_balancing_type, backend.moe_aux_loss_coeff
    if (balancing != "none") != (weight > 0):
        reason = f"does not match {KEY}.moe_router_load_balancing_type, which is {balancing}"
        yield Problem(f"{KEY}.moe_aux_loss_coeff", reason, got=weight, remedy="Set both keys or neither")
    ranks_of_tokens = backend.expert_model_parallel_size * (expert_tensor or tensor)
    if backend.moe_token_dispatcher_type == "flex" and (ranks_of_tokens == 1 or backend.moe_router_dtype != "fp32"):
        sizes = f"{KEY}.expert_model_parallel_size or {KEY}.tensor_model_parallel_size above 1"
        reason = f"needs {sizes}, and {KEY}.moe_router_dtype=fp32"
        yield Problem(f"{KEY}.moe_token_dispatcher_type", reason, got="flex", remedy="Set it to alltoall")
    if backend.moe_per_layer_logging and balancing == "none":
        condition = f"with {KEY}.moe_router_load_balancing_type=none, because there is no loss to report"
        remedy = f"Set another {KEY}.moe_router_load_balancing_type, or set this key to false"
        yield Problem.unused(f"{KEY}.moe_per_layer_logging", condition, remedy=remedy)


def check_architecture(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of a model or its layout that rl-megatron does not train, if the model's config is local."""
    yield from architecture_problems(local_hf_config(section), section.megatron_cfg)


def check_images(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings of images that do not go with the model, if its config is local, or with other settings."""
    yield from image_problems(section, section.megatron_cfg, local_whole_config(section))


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
    needing = ", ".join(sorted(RECOMPUTED_WITH_TE.intersection(modules)))
    for is_so, cause in (
        (_has_no_cuda(config), f"cluster.device is {config.cluster.device}"),
        (backend.transformer_engine is False, f"{KEY}.transformer_engine is false"),
        (section.lora_cfg.enabled, "adapters need layers of megatron-core"),
    ):
        if needing and is_so:
            reason = f"needs layers of Transformer Engine for {needing}, but {cause}"
            yield Problem(key, reason, remedy=f"Remove {needing}")
            return


def check_lora(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of adapters on layers that do not support them."""
    if section.lora_cfg.enabled and section.lora_cfg.target_parameters:
        yield EXPERTS_PROBLEM
    if section.lora_cfg.enabled and section.lora_cfg.use_dora:
        yield DORA_PROBLEM
    if section.lora_cfg.enabled and section.lora_cfg.base_quantization is not None:
        yield QUANTIZATION_PROBLEM
    if section.lora_cfg.enabled and section.lora_cfg.max_adapters > 1:
        yield SEVERAL_PROBLEM
    if section.lora_cfg.enabled and section.megatron_cfg.fp8_cfg.enabled:
        reason = "needs layers of Transformer Engine, but adapters need layers of megatron-core"
        remedy = "Set this key to false, or set lora_cfg.enabled=false"
        yield Problem(f"{KEY}.fp8_cfg.enabled", reason, remedy=remedy)


UNSUPPORTED_OPTIMIZERS = {
    **OF_WHOLE_PARAMETERS,
    "rl_core.torch.EightBitAdamW": "has scales for blocks of a parameter, but Megatron's ranks share the elements of a "
    "parameter without regard to blocks. With dtensor it works",
}
"""Optimizer classes that cannot step the runs of elements of Megatron's ranks, each with the reason."""


def check_8_bit(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings that contradict 8-bit matrix products."""
    backend: MegatronConfig = section.megatron_cfg
    if backend.fp8_cfg.enabled and backend.transformer_engine is False:
        reason = f"needs Transformer Engine, but {KEY}.transformer_engine is false"
        remedy = f"Set {KEY}.transformer_engine to true, or this key to false"
        yield Problem(f"{KEY}.fp8_cfg.enabled", reason, remedy=remedy)


def check_device(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the settings that no kernel of the run's device computes."""
    backend: MegatronConfig = section.megatron_cfg
    name = config.cluster.device
    yield from optimizer_problems(section, UNSUPPORTED_OPTIMIZERS, DEVICES.get(name))
    if not _has_no_cuda(config):
        return
    if backend.fp8_cfg.enabled:
        reason = f"needs Transformer Engine and a GPU, but cluster.device is {name}"
        yield Problem(f"{KEY}.fp8_cfg.enabled", reason, remedy="Set this key to false")
    elif backend.transformer_engine:
        reason = f"needs a GPU, but cluster.device is {name}"
        yield Problem(f"{KEY}.transformer_engine", reason, remedy="Remove this key, or set it to false")
    if backend.moe_token_dispatcher_type == "flex":
        reason = f"needs DeepEP and a GPU, but cluster.device is {name}"
        yield Problem(f"{KEY}.moe_token_dispatcher_type", reason, got="flex", remedy="Set it to alltoall")


def check_kwargs(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the further fields of Megatron's config that the device or the layers lack, or that have no effect."""
    backend: MegatronConfig = section.megatron_cfg
    device = config.cluster.device
    for name, value in backend.megatron_kwargs.items():
        key = f"{KEY}.megatron_kwargs.{name}"
        if name in FUSIONS and value is False:
            continue  # Every device and all layers can do without a fusion.
        remedy = "Set it to false" if name in FUSIONS else "Remove this key"
        if name in ON_CUDA and _has_no_cuda(config):
            yield Problem(key, f"needs a GPU, but cluster.device is {device}", remedy=remedy)
        elif name in WITH_TE and _has_no_cuda(config):
            reason = f"needs Transformer Engine and a GPU, but cluster.device is {device}"
            yield Problem(key, reason, remedy=remedy)
        elif name in WITH_TE and backend.transformer_engine is False:
            reason = f"needs Transformer Engine, but {KEY}.transformer_engine is false"
            yield Problem(key, reason, remedy=f"Remove this key or {KEY}.transformer_engine")
        elif name in WITH_TE and section.lora_cfg.enabled:
            reason = "needs layers of Transformer Engine, but adapters need layers of megatron-core"
            yield Problem(key, reason, remedy="Remove this key, or set lora_cfg.enabled=false")
        elif name in WITH_FP8 and not backend.fp8_cfg.enabled:
            yield Problem.unused(key, f"without {KEY}.fp8_cfg.enabled=true")
        else:
            yield from _effect_problems(key, name, backend)
    if backend.megatron_kwargs.get("tp_comm_overlap"):
        yield from _overlap_problems(section, f"{KEY}.megatron_kwargs.tp_comm_overlap")


def _effect_problems(key: str, name: str, backend: MegatronConfig) -> Iterable[Problem]:
    """Yield the problems of a further field of Megatron's config that has no effect, or the wrong one, with the other
    settings."""
    kwargs = backend.megatron_kwargs
    # Fields that have no effect, or need pipeline ranks, unless a condition on the other settings holds.
    unused = {
        ("recompute_method", "recompute_num_layers"): (backend.recompute == "full", f"{KEY}.recompute=full"),
        ("overlap_p2p_comm_warmup_flush",): (
            backend.virtual_pipeline_model_parallel_size is not None,
            f"{KEY}.virtual_pipeline_model_parallel_size",
        ),
        ("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"): (
            backend.moe_token_dispatcher_type == "flex",
            f"{KEY}.moe_token_dispatcher_type=flex",
        ),
        OF_TENSOR_OVERLAP: (kwargs.get("tp_comm_overlap"), f"{KEY}.megatron_kwargs.tp_comm_overlap=true"),
        ("cp_comm_type",): (backend.context_parallel_size > 1, f"{KEY}.context_parallel_size above 1"),
    }
    for names, (is_read, needed) in unused.items():
        if name in names and not is_read:
            yield Problem.unused(key, f"without {needed}")
    if name in ("deallocate_pipeline_outputs", "pipeline_model_parallel_layout", "batch_p2p_sync"):
        if backend.pipeline_model_parallel_size == 1:
            yield _without_pipeline(key)
    elif name == "cpu_offloading" and kwargs[name] and backend.recompute != "none":
        reason = f"cannot be combined with {KEY}.recompute={backend.recompute}"
        yield Problem(key, reason, remedy=f"Set {KEY}.recompute=none, or remove this key")
    elif name == "overlap_moe_expert_parallel_comm" and kwargs[name]:
        if backend.expert_model_parallel_size == 1:
            reason = f"needs expert parallelism, but {KEY}.expert_model_parallel_size is 1"
            yield Problem(key, reason, remedy=f"Remove this key, or set {KEY}.expert_model_parallel_size=2 or more")
        if backend.pipeline_model_parallel_size > 1 and backend.virtual_pipeline_model_parallel_size is None:
            reason = f"needs {KEY}.virtual_pipeline_model_parallel_size in a pipeline"
            yield Problem(key, reason, remedy="Remove this key, or set that one to 2 or more")
        if backend.recompute not in ("none", "selective"):
            reason = f"cannot be combined with {KEY}.recompute={backend.recompute}"
            yield Problem(key, reason, remedy=f"Remove this key, or set {KEY}.recompute to none or selective")
    elif name == "moe_router_fusion":
        if backend.moe_router_dtype != "fp32":
            reason = f"needs {KEY}.moe_router_dtype=fp32, because the fused router has no float64"
            yield Problem(key, reason, remedy=f"Remove this key or {KEY}.moe_router_dtype")
        if backend.moe_router_replay:
            cause = "because the fused router chooses experts itself"
            reason = f"cannot be combined with {KEY}.moe_router_replay=true, {cause}"
            yield Problem(key, reason, remedy=f"Remove this key or {KEY}.moe_router_replay")
    elif name == "moe_shared_expert_overlap" and kwargs[name]:
        if backend.moe_token_dispatcher_type != "alltoall":
            remedy = f"Remove this key, or set {KEY}.moe_token_dispatcher_type=alltoall"
            yield Problem(key, f"needs {KEY}.moe_token_dispatcher_type=alltoall", remedy=remedy)
        if "shared_experts" in (backend.recompute_modules or ()):
            reason = f"cannot be combined with shared_experts in {KEY}.recompute_modules"
            yield Problem(key, reason, remedy="Remove this key, or shared_experts there")


def _overlap_problems(section: Any, key: str) -> Iterable[Problem]:
    """Yield the problems that prevent collectives of tensor-parallel ranks from overlapping with matrix products."""
    backend: MegatronConfig = section.megatron_cfg
    if backend.tensor_model_parallel_size == 1 or not backend.sequence_parallel:
        reason = f"needs {KEY}.sequence_parallel=true and {KEY}.tensor_model_parallel_size above 1"
        yield Problem(key, reason, remedy="Remove this key, or set both")
    if section.precision != "bfloat16":
        yield Problem(key, "needs precision=bfloat16", got=section.precision, remedy="Remove this key")
    recipe = backend.fp8_cfg.fp8_recipe
    if backend.fp8_cfg.enabled and recipe not in ("delayed", "tensorwise"):
        reason = f"needs one scale per tensor, but {KEY}.fp8_cfg.fp8_recipe is {recipe}"
        yield Problem(key, reason, remedy=f"Remove this key, or set {KEY}.fp8_cfg.fp8_recipe to delayed or tensorwise")
    if "kv_lora_rank" in local_hf_config(section):
        reason = "needs attention whose projections have buffers, but this model's is latent"
        yield Problem(key, reason, remedy="Remove this key")
    if not backend.pads_microbatches or not section.sequence_packing.enabled:
        needed = "needs packed microbatches of one length"
        reason = f"{needed}, but sequence_packing.enabled or {KEY}.fixed_length_microbatches is false"
        remedy = f"Remove this key, or set sequence_packing.enabled=true and {KEY}.fixed_length_microbatches=auto"
        yield Problem(key, reason, remedy=remedy)
        return
    budgets = [Batching.of(section, training=training).max_tokens or 0 for training in (True, False)]
    train, read = (max(budget, section.max_total_sequence_length) for budget in budgets)
    if train != read:
        found = f"but they have {train} and {read} tokens"
        reason = f"needs microbatches of one length in training and in logprob passes, {found}"
        remedy = "Set sequence_packing.logprob_mb_tokens to sequence_packing.train_mb_tokens"
        yield Problem(key, reason, remedy=remedy)


def _has_no_cuda(config: RunConfig) -> bool:
    """Return whether the run's device certainly has no kernels of CUDA; `auto` may still become either."""
    device = config.cluster.device
    return device in DEVICES and DEVICES[device].kernels != "cuda"


def _without_pipeline(key: str) -> Problem:
    name = f"{KEY}.pipeline_model_parallel_size"
    return Problem(key, f"needs pipeline parallelism, but {name} is 1", remedy=f"Set {name}=2 or more")


CHECKS = (
    check_layout,
    check_architecture,
    check_images,
    check_recompute,
    check_lora,
    check_8_bit,
    check_device,
    check_kwargs,
)
"""All checks, in the order of their problems in messages."""
