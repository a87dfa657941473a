"""Checks of settings against the device, the model and one another; read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.facts.hf_config import num_experts_of
from rl_core.model import HEADLESS_ROLES, Role
from rl_core.model_config import (
    QWEN_WITH_IMAGES,
    LoraConfig,
    ModelConfig,
    VisionConfig,
    image_family_problems,
    local_hf_config,
)
from rl_dtensor.config import AttentionBackend, DTensorConfig
from rl_dtensor.parallel.sizes import SECTION, text_fields

MAX_FLASH_DIM = 256
"""Largest heads that flash attention takes."""

HEAD_DIMS = ("head_dim", "global_head_dim", "v_head_dim")
"""Fields of a Hugging Face config that size heads."""

ATTENTION, DISPATCHER = f"{SECTION}.attention_backend", f"{SECTION}.expert_dispatcher"
FLOAT8, QAT = f"{SECTION}.float8", f"{SECTION}.qat"
DRAFT_KEY = "draft_head.model_name"
_FLASH = ("flash_attention_2", "flash_attention_3")

FAMILIES = (
    *(*QWEN_WITH_IMAGES, "glm4v", "glm4v_moe", "glm46v"),
    *("gemma3", "gemma4", "mistral3", "llama4", "idefics3", "smolvlm", "internvl"),
)
"""Model types that train with images."""
BOTH_WAYS = ("gemma3",)
"""Families whose image tokens see one another."""


def without_softcap(backend: AttentionBackend) -> Problem | None:
    """Return the problem of a backend that cannot bound attention scores; None if it can."""
    return _without("soft cap of attention scores", backend) if backend == "sdpa" else None


def without_sinks(backend: AttentionBackend) -> Problem | None:
    """Return the problem of a backend that cannot add sinks to the softmax; None if it can."""
    return None if backend in ("auto", "eager", "flex") else _without("attention sinks", backend)


def _without(needed: str, backend: AttentionBackend) -> Problem:
    remedy = "Set it to auto or eager, or to flex on GPUs"
    return Problem(ATTENTION, f"does not support the {needed} of this model", got=backend, remedy=remedy)


def kernel_problems(backend: DTensorConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of an attention backend that does not take heads of this model's size, or its soft cap.

    Args:
        backend: Settings of the backend.
        model: Fields of the model's Hugging Face config; missing fields are not checked.
    """
    attention, largest = backend.attention_backend, largest_head(model)
    if attention in _FLASH and largest > MAX_FLASH_DIM:
        reason = f"supports head dimensions up to {MAX_FLASH_DIM}, but this model uses {largest}"
        yield Problem(ATTENTION, reason, got=attention, remedy="Set it to auto or sdpa")
    capped = text_fields(model).get("attn_logit_softcapping") is not None
    if capped and (problem := without_softcap(attention)):
        yield problem


def largest_head(model: Mapping[str, Any]) -> int:
    """Return the entries of the largest query, key or value head; 0 if the fields do not show them."""
    model = text_fields(model)
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    stated = [model.get(name) for name in HEAD_DIMS]
    latent = [model.get("qk_nope_head_dim"), model.get("qk_rope_head_dim")]  # Latent attention joins both parts.
    sizes = [*(size for size in stated if isinstance(size, int)), sum(size for size in latent if isinstance(size, int))]
    if not any(sizes) and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return hidden // heads
    return max(sizes)


def device_problems(backend: DTensorConfig, *, precision: str, device: Device | None) -> Iterator[Problem]:
    """Yield the problems of settings that this device or compute dtype cannot run.

    Args:
        backend: Settings of the backend.
        precision: Name of the compute dtype, such as `bfloat16`.
        device: Device of the workers; None if it is not known yet.
    """
    attention = backend.attention_backend
    no_gpus = f"needs GPUs, but the device is {device.name}" if device is not None and not device.runs_on_gpus else ""
    if no_gpus and attention in (*_FLASH, "flex"):
        yield Problem(ATTENTION, no_gpus, got=attention, allowed="auto, sdpa, eager")
    if precision == "float32" and attention in _FLASH:
        remedy = "Set precision=bfloat16, or set this key to auto, sdpa or flex"
        yield Problem(ATTENTION, "needs half precision, but precision is float32", got=attention, remedy=remedy)
    if backend.expert_dispatcher == "deep_ep" and backend.expert_parallel_size > 1:
        if no_gpus:
            yield Problem(DISPATCHER, no_gpus, got="deep_ep", allowed="all_to_all")
        if precision != "bfloat16":
            reason = f"sends bfloat16, but precision is {precision}"
            remedy = "Set precision=bfloat16, or expert_dispatcher=all_to_all"
            yield Problem(DISPATCHER, reason, got="deep_ep", remedy=remedy)


def low_precision_problems(
    backend: DTensorConfig, adapters: LoraConfig, *, precision: str, device: Device | None
) -> Iterator[Problem]:
    """Yield the settings of float8 and quantisation-aware training that cannot run, or would have no effect.

    Args:
        backend: Settings of the backend.
        adapters: Adapters of the model.
        precision: Name of the compute dtype, such as `bfloat16`.
        device: Device of the workers; None if it is not known yet.
    """
    qat = backend.qat
    if backend.float8.enabled and not backend.float8.emulate:
        if device is not None and not device.runs_on_gpus:
            reason = f"needs GPUs of compute capability 8.9 or higher, but the device is {device.name}"
            remedy = f"Set {FLOAT8}.emulate=true to round as float8 does, without its speed, or remove this key"
            yield Problem(f"{FLOAT8}.enabled", reason, got=True, remedy=remedy)
        if precision != "bfloat16":
            reason = f"multiplies into bfloat16, but precision is {precision}"
            remedy = f"Set precision=bfloat16, or {FLOAT8}.emulate=true"
            yield Problem(f"{FLOAT8}.enabled", reason, got=True, remedy=remedy)
    if qat.enabled and backend.float8.enabled:
        reason = "rounds the weights that float8 products would round again"
        yield Problem(f"{QAT}.enabled", reason, got=True, remedy=f"Remove {FLOAT8}.enabled or this key")
    if qat.enabled and adapters.enabled:
        reason = "rounds the weights that train, but with lora_cfg.enabled only adapters train"
        remedy = "Set lora_cfg.enabled=false, or remove this key"
        yield Problem(f"{QAT}.enabled", reason, got=True, remedy=remedy)
    quantization = adapters.base_quantization if adapters.enabled else None
    if quantization is not None:
        clashes = ((backend.float8.enabled, f"{FLOAT8}.enabled"), (backend.compile, "dtensor_cfg.compile"))
        for is_set, key in clashes:
            if is_set:
                reason = (
                    f"cannot be combined with {key}=true, because layers dequantise their weights when they compute"
                )
                remedy = f"Remove {key} or this key"
                yield Problem("lora_cfg.base_quantization", reason, got=quantization, remedy=remedy)
    if qat.enabled and qat.format != "int4" and "group_size" in qat.model_fields_set:
        yield Problem.unused(f"{QAT}.group_size", f"with {QAT}.format={qat.format}")


def adapter_problems(backend: DTensorConfig, adapters: LoraConfig) -> Iterator[Problem]:
    """Yield the settings that several adapters on one base cannot be combined with.

    Args:
        backend: Settings of the backend.
        adapters: Adapters of the model.
    """
    if not adapters.enabled or adapters.max_adapters == 1:
        return
    for name, reason in (
        ("sequence_parallel", "whose layers see only a part of the tokens of each adapter"),
        ("compile", "whose layers would be compiled for the rows of every microbatch"),
    ):
        if getattr(backend, name):
            reason = f"cannot be combined with dtensor_cfg.{name}=true, {reason}"
            remedy = f"Set dtensor_cfg.{name}=false, or remove this key"
            yield Problem("lora_cfg.max_adapters", reason, got=adapters.max_adapters, remedy=remedy)


def vision_build_problems(vision: VisionConfig, backend: DTensorConfig, config: Any, role: Role) -> Iterator[Problem]:
    """Yield the settings that do not go with a vision-language model, or with its role.

    Args:
        vision: Settings of images; without `enabled` nothing is checked.
        backend: Settings of the backend.
        config: Whole Hugging Face config.
        role: Role of the model.
    """
    if vision.enabled and role in HEADLESS_ROLES:
        reason = f"is not supported for a {role}, whose head has one output"
        yield Problem("vision.enabled", reason, got=True, allowed="false")
    yield from vision_problems(vision, backend, config.to_dict())


def vision_problems(vision: VisionConfig, backend: DTensorConfig, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the settings that do not go with a vision-language model.

    Args:
        vision: Settings of images.
        backend: Settings of the backend.
        fields: Fields of the whole Hugging Face config; empty if it is not available.
    """
    if vision.enabled and (stages := backend.pipeline_parallel_size) > 1:
        reason = "must be 1 with vision.enabled=true: a vision tower cannot be cut into stages"
        remedy = "Set it to 1, and tensor_parallel_size or context_parallel_size instead"
        yield Problem(f"{SECTION}.pipeline_parallel_size", reason, got=stages, remedy=remedy)
    yield from image_family_problems(vision, fields, FAMILIES)
    kind, seen_by = fields.get("model_type"), (fields.get("text_config") or {}).get("use_bidirectional_attention")
    if not vision.enabled or kind not in FAMILIES:
        return
    if (kind in BOTH_WAYS or seen_by == "vision") and backend.attention_backend in _FLASH:
        reason = f"cannot let the tokens of an image see one another, as {kind} models do"
        yield Problem(ATTENTION, reason, got=backend.attention_backend, allowed="auto, sdpa, eager, flex")


def exactness_problem(model: ModelConfig, device: Device) -> str:
    """Return why neither trainer nor generator can compute a model's rows alike in every batch; empty if both can."""
    if device.runs_on_gpus:
        return f"it is exact on cpu only, and the device is {device.name}"
    if model.precision != "float32":
        return f"it is exact in float32 only. Set policy.precision=float32, got {model.precision}"
    if model.lora_cfg.enabled:
        return "adapters are merged into the weights of the generator, which rounds. Set policy.lora_cfg.enabled=false"
    if model.vision.enabled:
        return "towers of images are not exact. Set policy.vision.enabled=false"
    if num_experts_of(local_hf_config(model)):
        return f"the experts of {model.model_name} are not exact. Choose a model without experts"
    return ""


def exact_training_problem(backend: DTensorConfig, model: ModelConfig, device: Device) -> str:
    """Return why the trainer cannot compute the generator's bits; empty if it can."""
    for key, value, exact in (
        ("attention_backend", backend.attention_backend, "auto"),
        ("compile", backend.compile, "false"),
        ("float8.enabled", backend.float8.enabled, "false"),
        ("qat.enabled", backend.qat.enabled, "false"),
    ):
        if (shown := str(value).lower()) != exact:
            return f"{SECTION}.{key}={shown} computes other bits. Set it to {exact}"
    return exactness_problem(model, device)


def draft_head_problems(section: ModelConfig, backend: DTensorConfig) -> Iterator[Problem]:
    """Yield the problems of `draft_head` with the other settings of its model."""
    if section.draft_head is None:
        return
    for size in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        if (value := getattr(backend, size)) > 1:
            reason = "must be 1 with draft_head, because the head reads whole hidden states"
            yield Problem(f"{SECTION}.{size}", reason, got=value, remedy="Set it to 1, or remove draft_head")
    if section.vision.enabled:
        reason = "is not supported with draft_head, because the head does not read images"
        yield Problem("vision.enabled", reason, got=True, remedy="Remove one of the two")
    if section.precision == "float16":
        reason = "is not supported with draft_head, whose loss is not scaled"
        yield Problem("precision", reason, got="float16", remedy="Set it to bfloat16, or remove draft_head")
    if section.lora_cfg.enabled:
        reason = "has not been verified with draft_head"
        yield Problem("lora_cfg.enabled", reason, got=True, remedy="Remove one of the two")
