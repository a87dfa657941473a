"""Checks of `megatron_kwargs`: fields that the device, the layers or other settings of a run do not support."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.config import Problem
from rl_core.data.microbatch import Batching
from rl_core.devices import DEVICES
from rl_core.model_config import local_hf_config
from rl_core.run_config import RunConfig
from rl_megatron.config import KEY, MegatronConfig
from rl_megatron.transformer_fields import FUSIONS, OF_TENSOR_OVERLAP, ON_CUDA, WITH_FP8, WITH_TE


def check_kwargs(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the further fields of Megatron's config that the device or the layers lack, or that have no effect."""
    backend: MegatronConfig = section.megatron_cfg
    device = config.cluster.device
    is_on_cpu = device in DEVICES and DEVICES[device].kernels != "cuda"
    for name, value in backend.megatron_kwargs.items():
        key = f"{KEY}.megatron_kwargs.{name}"
        if name in FUSIONS and value is False:
            continue  # holds on every device and for all layers
        if name in ON_CUDA and is_on_cpu:
            yield Problem(key, f"needs a GPU, but cluster.device is {device}", remedy="Remove this key")
        elif name in WITH_TE and is_on_cpu:
            reason = f"needs Transformer Engine and a GPU, but cluster.device is {device}"
            yield Problem(key, reason, remedy="Remove this key")
        elif name in WITH_TE and backend.transformer_engine is False:
            yield Problem(
                key,
                f"needs Transformer Engine, but {KEY}.transformer_engine is false",
                remedy=f"Remove this key or {KEY}.transformer_engine",
            )
        elif name in WITH_TE and section.lora_cfg.enabled:
            yield Problem(
                key,
                "needs layers of Transformer Engine, but adapters need layers of megatron-core",
                remedy="Remove this key, or set lora_cfg.enabled=false",
            )
        elif name in WITH_FP8 and not backend.fp8_cfg.enabled:
            yield Problem.unused(key, f"without {KEY}.fp8_cfg.enabled=true")
        else:
            yield from _effect_problems(key, name, backend)
    yield from _tensor_overlap(section)


def _effect_problems(key: str, name: str, backend: MegatronConfig) -> Iterable[Problem]:
    """Yield the problem of a further field of Megatron's config that has no effect, or the wrong one, with the other
    settings."""
    if name in ("recompute_method", "recompute_num_layers"):
        if backend.recompute != "full":
            yield Problem.unused(key, f"without {KEY}.recompute=full")
    elif name == "cpu_offloading":
        if backend.megatron_kwargs[name] and backend.recompute != "none":
            yield Problem(
                key,
                f"cannot be combined with {KEY}.recompute={backend.recompute}",
                remedy=f"Set {KEY}.recompute=none, or remove this key",
            )
    elif name in ("deallocate_pipeline_outputs", "pipeline_model_parallel_layout", "batch_p2p_sync"):
        if backend.pipeline_model_parallel_size == 1:
            yield without_pipeline(key)
    elif name == "overlap_p2p_comm_warmup_flush":
        if backend.virtual_pipeline_model_parallel_size is None:
            yield Problem.unused(key, f"without {KEY}.virtual_pipeline_model_parallel_size")
    elif name in ("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"):
        if backend.moe_token_dispatcher_type != "flex":
            yield Problem.unused(key, f"without {KEY}.moe_token_dispatcher_type=flex")
    elif name == "moe_router_fusion":
        if backend.moe_router_dtype != "fp32":
            yield Problem(
                key,
                f"needs {KEY}.moe_router_dtype=fp32, because the fused router has no float64",
                remedy=f"Remove this key or {KEY}.moe_router_dtype",
            )
        if backend.moe_router_replay:
            yield Problem(
                key,
                f"cannot be combined with {KEY}.moe_router_replay=true, because the fused router chooses experts "
                "itself",
                remedy=f"Remove this key or {KEY}.moe_router_replay",
            )
    elif name == "moe_shared_expert_overlap":
        yield from _shared_overlap(key, backend)
    elif name in OF_TENSOR_OVERLAP:
        if not backend.megatron_kwargs.get("tp_comm_overlap"):
            yield Problem.unused(key, f"without {KEY}.megatron_kwargs.tp_comm_overlap=true")
    elif name == "cp_comm_type" and backend.context_parallel_size == 1:
        yield Problem.unused(key, f"without {KEY}.context_parallel_size above 1")


def _shared_overlap(key: str, backend: MegatronConfig) -> Iterable[Problem]:
    """Yield what prevents shared experts from being computed while tokens travel to the others."""
    if not backend.megatron_kwargs["moe_shared_expert_overlap"]:
        return
    if backend.moe_token_dispatcher_type != "alltoall":
        yield Problem(
            key,
            f"needs {KEY}.moe_token_dispatcher_type=alltoall",
            remedy=f"Remove this key, or set {KEY}.moe_token_dispatcher_type=alltoall",
        )
    if "shared_experts" in (backend.recompute_modules or ()):
        yield Problem(
            key,
            f"cannot be combined with shared_experts in {KEY}.recompute_modules",
            remedy="Remove this key, or shared_experts there",
        )


def _tensor_overlap(section: Any) -> Iterable[Problem]:
    """Yield what prevents collectives of tensor-parallel ranks from overlapping with matrix products."""
    backend: MegatronConfig = section.megatron_cfg
    if not backend.megatron_kwargs.get("tp_comm_overlap"):
        return
    key = f"{KEY}.megatron_kwargs.tp_comm_overlap"
    if backend.tensor_model_parallel_size == 1 or not backend.sequence_parallel:
        yield Problem(
            key,
            f"needs {KEY}.sequence_parallel=true and {KEY}.tensor_model_parallel_size above 1",
            remedy="Remove this key, or set both",
        )
    if section.precision != "bfloat16":
        yield Problem(key, "needs precision=bfloat16", got=section.precision, remedy="Remove this key")
    if backend.fp8_cfg.enabled and backend.fp8_cfg.fp8_recipe not in ("delayed", "tensorwise"):
        yield Problem(
            key,
            f"needs one scale per tensor, but {KEY}.fp8_cfg.fp8_recipe is {backend.fp8_cfg.fp8_recipe}",
            remedy=f"Remove this key, or set {KEY}.fp8_cfg.fp8_recipe to delayed or tensorwise",
        )
    if "kv_lora_rank" in local_hf_config(section):
        yield Problem(
            key, "needs attention whose projections have buffers, but this model's is latent", remedy="Remove this key"
        )
    if not backend.pads_microbatches or not section.sequence_packing.enabled:
        yield Problem(
            key,
            f"needs packed microbatches of one length, but sequence_packing.enabled or "
            f"{KEY}.fixed_length_microbatches is false",
            remedy=f"Remove this key, or set sequence_packing.enabled=true and {KEY}.fixed_length_microbatches=auto",
        )
        return
    budgets = {training: Batching.of(section, training=training).max_tokens or 0 for training in (True, False)}
    train, read = (max(budget, section.max_total_sequence_length) for budget in budgets.values())
    if train != read:
        yield Problem(
            key,
            f"needs microbatches of one length in training and in logprob passes, but they have {train} and {read} "
            "tokens",
            remedy="Set sequence_packing.logprob_mb_tokens to sequence_packing.train_mb_tokens",
        )


def without_pipeline(key: str) -> Problem:
    """Return the problem of a key that only pipeline-parallel ranks read."""
    name = f"{KEY}.pipeline_model_parallel_size"
    return Problem(key, f"needs pipeline parallelism, but {name} is 1", remedy=f"Set {name}=2 or more")
