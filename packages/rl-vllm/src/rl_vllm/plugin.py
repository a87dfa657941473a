"""The vLLM generator's plugin and its checks of a config, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_core.config import Problem
from rl_core.devices import Device
from rl_core.facts.hf_config import NUM_EXPERTS, num_positions, switches_at
from rl_core.facts.rank_layout import EngineLayout
from rl_core.facts.vllm_readings import scales_read_otherwise
from rl_core.model_config import ModelConfig, local_family, local_hf_config
from rl_core.plugins import BackendPlugin, Preload, Requirement
from rl_core.run_config import RunConfig
from rl_core.weights import ITEM_BYTES
from rl_vllm.config import GIB, MAX_SHARE, MAX_SHARED, MAX_TEMPERATURE, MIN_TEMPERATURE, SpeculationConfig, VllmConfig
from rl_vllm.engine.process_env import import_variables

MAX_ADAPTER_DIM = 512
"""Largest dim that vLLM 0.32 has room for."""

FOLDED = "kv_b_proj"
"""The layer of multi-head latent attention that vLLM computes with only while it reads a prompt."""

KEY = "generation.vllm_cfg"


def _lengths(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of the length of rows: room for prompts, and the model's positions."""
    generation, fields = section.generation, local_hf_config(section)
    max_model_len, longest = generation.vllm_cfg.max_model_len, section.max_total_sequence_length
    if max_model_len is not None and max_model_len <= generation.max_new_tokens:
        reason = f"leaves no room for a prompt, because max_new_tokens is {generation.max_new_tokens}"
        remedy = "Increase it, or remove this key to use max_total_sequence_length"
        yield Problem(f"{KEY}.max_model_len", reason, got=max_model_len, remedy=remedy)
    limit, switch = num_positions(fields), switches_at(fields)
    # The engine has room for one token more than a row, and chooses by that room.
    if switch is not None and (longest > switch) != ((max_model_len or longest) + 1 > switch):
        room = f"room for {max_model_len or longest} tokens: the long factors begin after {switch} tokens"
        reason = f"selects other factors of LongRoPE in training than in vLLM, which has {room}"
        remedy = f"Set it below or above {switch}, and remove {KEY}.max_model_len"
        yield Problem("max_total_sequence_length", reason, got=longest, remedy=remedy)
    if limit is not None and max_model_len is not None and max_model_len > limit:
        reason = f"exceeds the model's positions, which are for {limit} tokens"
        remedy = "Lower it, or extend the positions in hf_config_overrides (rope_parameters, max_position_embeddings)"
        yield Problem(f"{KEY}.max_model_len", reason, got=max_model_len, remedy=remedy)


def _architecture(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of a model that vLLM computes differently, or cannot split."""
    fields = local_hf_config(section)
    found = scales_read_otherwise(fields)
    kind = found.pop("rope_type", None)
    for name, value in found.items():
        yield Problem(
            "hf_config_overrides.rope_parameters",
            f"has {name}={value} with rope_type {kind}, which vLLM reads differently from the policy, so it would "
            "compute different logprobs",
            remedy="Set generation.backend=hf, or set other rope_parameters, which changes the model",
        )
    size, heads = section.generation.vllm_cfg.tensor_parallel_size, fields.get("num_attention_heads")
    if heads and heads % size:
        reason = f"does not divide the model's {heads} attention heads"
        yield Problem(f"{KEY}.tensor_parallel_size", reason, got=size, remedy="Set it to a divisor")
    count = section.generation.vllm_cfg.data_parallel_size
    if count > 1 and fields and not any(fields.get(name) for name in NUM_EXPERTS):
        reason = "is for mixtures of experts, and the model has none: engines of a dense model are separate replicas"
        yield Problem(f"{KEY}.data_parallel_size", reason, got=count, remedy="Remove this key")


def _sampling(section: Any, config: RunConfig) -> Iterable[Problem]:
    """Yield the problems of temperatures, and of speculative decoding."""
    generation = section.generation
    for key, temperature in (("temperature", generation.temperature), ("val_temperature", generation.val_temperature)):
        if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            reason = "is outside the temperatures at which vLLM samples"
            allowed = f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
            yield Problem(f"generation.{key}", reason, got=temperature, allowed=allowed)
    speculation = generation.vllm_cfg.speculation
    if speculation is not None and generation.min_p:
        yield Problem(
            "generation.min_p",
            "does not work with vllm_cfg.speculation: vLLM accepts drafts without it, so that tokens and logprobs "
            "would be those of another distribution",
            got=generation.min_p,
            remedy=f"Set top_p or top_k instead, or remove {KEY}.speculation",
        )
    if speculation is not None and speculation.model is not None:
        yield from _drafter(speculation, section)


def _quantization(section: Any, config: RunConfig) -> Iterable[Problem]:
    quantization = section.generation.vllm_cfg.quantization
    if quantization is None:
        return
    if section.precision != "bfloat16":
        reason = f"quantises weights in bfloat16, but policy.precision is {section.precision}"
        remedy = f"Set policy.precision=bfloat16, or remove {KEY}.quantization"
        yield Problem(f"{KEY}.quantization.method", reason, got=quantization.method, remedy=remedy)
    num_layers = local_hf_config(section).get("num_hidden_layers", 0)
    first = quantization.num_first_layers_in_bf16
    if num_layers and first + quantization.num_last_layers_in_bf16 >= num_layers:
        reason = f"and num_last_layers_in_bf16 together leave none of the model's {num_layers} layers to quantise"
        key = f"{KEY}.quantization.num_first_layers_in_bf16"
        yield Problem(key, reason, got=first, remedy="Lower one of them")


MTP_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Types of the models whose layers for multi-token prediction draft: the tests of this package compare them with
transformers."""


def _drafter(speculation: SpeculationConfig, policy: ModelConfig) -> Iterable[Problem]:
    """Yield the problems of a drafter's files."""
    key, folder = f"{KEY}.speculation.model", speculation.model or ""
    fields = local_hf_config(ModelConfig(model_name=folder))
    if not fields:
        reason, remedy = "is not a folder of this machine with the files of a model", "Download the drafter first"
        yield Problem(key, reason, got=folder, remedy=remedy)
        return
    if speculation.method == "mtp":
        if (family := fields.get("model_type")) not in MTP_FAMILIES:
            verified = f"only of {', '.join(MTP_FAMILIES)}"
            layers = "layers for multi-token prediction in models of the type"
            reason = f"vLLM has not been verified with {layers} {family}, {verified}"
            yield Problem(key, reason, got=folder, remedy="Set another method")
        elif not fields.get("num_nextn_predict_layers"):
            reason = "has no layer for multi-token prediction: its config.json lacks num_nextn_predict_layers"
            yield Problem(key, reason, got=folder, remedy="Set another method")
    elif Path(folder).expanduser().resolve() == Path(policy.model_name).expanduser().resolve():
        reason = "is the policy's own model, which costs as much as it saves"
        yield Problem(key, reason, got=folder, remedy="Set a smaller model of the same family")
        return
    rows, drafted = local_hf_config(policy).get("vocab_size"), fields.get("vocab_size")
    if rows and rows != drafted:
        reason = f"has {drafted} tokens, but the policy's model has {rows}: they do not share a vocabulary"
        yield Problem(key, reason, got=folder, remedy="Set a drafter of the same model family")


IMAGE_FAMILIES = ("gemma3", "idefics3", "internvl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Types of the models that are served with images: the tests of this package compare them with transformers."""

BIDIRECTIONAL = ("gemma3",)
"""Types of models with attention in both directions between the tokens of an image. vLLM's attention on CPU (0.32)
computes it for none."""


def image_problem(config: VllmConfig, model: ModelConfig, device: Device) -> str:
    """Return why the engine cannot serve this model with images; empty if it can."""
    family = local_family(model)
    if family is not None and family not in IMAGE_FAMILIES:
        return (
            f"vLLM has not been verified with images of models of the type {family}, only of "
            f"{', '.join(IMAGE_FAMILIES)}. Set it to false, which trains and serves the language model only"
        )
    if family in BIDIRECTIONAL and not device.runs_on_gpus:
        return (
            f"on {device.name} vLLM's attention does not let the tokens of an image see one another in both "
            f"directions, as models of the type {family} do. Use GPUs, or generation.backend=hf"
        )
    if config.speculation is not None:
        return f"speculative decoding has not been verified with images. Remove {KEY}.speculation"
    if config.data_parallel_size > 1:
        return f"images have not been verified in several engines. Set {KEY}.data_parallel_size=1"
    if config.quantization is not None:
        return f"weights in 8 bits have not been verified with images. Remove {KEY}.quantization"
    return ""


def routing_problem(config: VllmConfig, device: Device) -> str:
    """Return why completions cannot carry the experts that tokens were sent to; empty if they can."""
    if not device.runs_on_gpus:
        # The AuxOutput connector of vLLM 0.32 is part of model runner V2.
        return (
            f"on {device.name} vLLM has only model runner V1, and only V2, which needs Triton, reports routing. Set "
            "generation.backend=hf or megatron"
        )
    if config.speculation is not None:
        return (
            "vLLM has not been verified to leave out the routing of drafts that were not accepted. Remove "
            f"{KEY}.speculation"
        )
    if config.data_parallel_size > 1:
        return f"routing has not been verified in several engines. Set {KEY}.data_parallel_size=1"
    if config.pipeline_parallel_size > 1:
        return f"only the last of several pipeline ranks reports. Set {KEY}.pipeline_parallel_size=1"
    return ""


def adapter_problem(config: VllmConfig, model: ModelConfig, device: Device) -> str:
    """Return why the engine cannot apply the adapters of this model itself; empty if it can."""
    lora = model.lora_cfg
    if config.data_parallel_size > 1:
        return (
            "adapters that vLLM applies have not been verified in several engines. Set lora_sync=merged, or "
            f"{KEY}.data_parallel_size=1"
        )
    if config.speculation is not None:
        return (
            "speculative decoding has not been verified with adapters that vLLM applies. Set lora_sync=merged, or "
            f"remove {KEY}.speculation"
        )
    if model.vision.enabled:
        return (
            "adapters that vLLM applies have not been verified with models that take images (vision.enabled). Set "
            "lora_sync=merged"
        )
    if config.quantization is not None:
        return (
            "adapters that vLLM applies to quantised weights have not been verified. Set lora_sync=merged, or remove "
            f"{KEY}.quantization"
        )
    if lora.max_dim > MAX_ADAPTER_DIM:
        key = "dim" if lora.dim > MAX_ADAPTER_DIM else "rank_pattern"
        return (
            f"vLLM applies adapters up to dim {MAX_ADAPTER_DIM}, but lora_cfg.{key} asks for {lora.max_dim}. Set "
            "lora_sync=merged, or lower it"
        )
    if lora.use_dora:
        return (
            "vLLM applies the products of adapters, not the magnitudes of DoRA (lora_cfg.use_dora). Set "
            "lora_sync=merged, or use_dora=false"
        )
    if lora.target_parameters:
        return (
            "vLLM does not receive adapters of experts (lora_cfg.target_parameters) separately. Set lora_sync=merged, "
            "or leave target_parameters empty"
        )
    if config.sleep_level == 2:
        return "the engine must keep the base weights of the adapters, but vllm_cfg.sleep_level=2 drops them in sleep"
    if device.runs_on_gpus and model.precision == "float32":
        return "on GPUs vLLM applies adapters only in half precision. Set policy.precision=bfloat16"
    ends = [target.rpartition(".")[2] for target in lora.target_modules]
    adapts_folded = (lora.match_all_linear or FOLDED in ends) and FOLDED not in lora.exclude_modules
    if adapts_folded and "kv_lora_rank" in local_hf_config(model):
        return (
            f"vLLM folds {FOLDED} into attention, which then computes without its adapter. Add {FOLDED} to "
            "lora_cfg.exclude_modules"
        )
    return ""


def _preload(config: VllmConfig, device: Device) -> Preload:
    """Return all of vLLM except its engine's core, which imports Ray."""
    worker = "vllm.v1.worker.gpu_worker" if device.runs_on_gpus else "vllm.v1.worker.cpu_worker"
    modules = ("vllm.engine.arg_utils", worker, "vllm.lora.model_manager")
    return Preload(modules, import_variables(device, eager=config.is_eager(device)))


def _draft_model(config: VllmConfig) -> str | None:
    speculation = config.speculation
    return speculation.model if speculation is not None and speculation.method == "draft_model" else None


def _draft_head(config: VllmConfig) -> str | None:
    speculation = config.speculation
    return speculation.model if speculation is not None and speculation.drafts_with_head else None


def _exact_problem(config: VllmConfig, model: ModelConfig, device: Device) -> str:
    """Return why vLLM does not compute the trainer's bits."""
    if not device.runs_on_gpus:
        return "vLLM has no batch-invariant kernels for CPUs. Set generation.backend=hf"
    return (
        "with batch-invariant kernels a token has the same bits in every batch of vLLM, but its norms, rotary "
        "embeddings and attention are other kernels than the trainer's. Set generation.backend=hf and "
        "cluster.device=cpu"
    )


def _engine_layout(model: ModelConfig, config: VllmConfig, device: Device, *, is_shared: bool) -> EngineLayout:
    """Return what an engine keeps of a device; see `BackendPlugin.engine_layout`."""
    quantized = config.quantization is not None
    share = config.gpu_memory_utilization or (MAX_SHARED if is_shared else MAX_SHARE)
    size = config.kv_cache_gib
    if size is None and not device.runs_on_gpus:
        size = 1.0
    return EngineLayout(
        tensor=config.tensor_parallel_size,
        pipeline=config.pipeline_parallel_size,
        engines=config.data_parallel_size,
        weight_bytes=1.0 if quantized else ITEM_BYTES[model.precision],
        cache_bytes=1.0 if "8" in config.kv_cache_dtype else ITEM_BYTES[model.precision],
        num_sequences=config.max_num_seqs,
        share=None if size is not None else share,
        cache_size=None if size is None else size * GIB,
        is_eager=config.is_eager(device),
    )


PLUGIN = BackendPlugin(
    name="vllm",
    key="vllm_cfg",
    config=VllmConfig,
    worker="rl_vllm.generator:VllmGenerator",
    follower="rl_vllm.follower:VllmFollower",
    requirement=Requirement("rl-vllm", {"cpu": ("cpu",), "cuda": ("cuda",)}, imports=("vllm",)),
    ranks=lambda config: config.num_ranks,
    engine_layout=_engine_layout,
    preload=_preload,
    checks=(_lengths, _architecture, _sampling, _quantization),
    routing_problem=routing_problem,
    adapter_problem=adapter_problem,
    exact_problem=_exact_problem,
    keeps_cache=True,
    images=Requirement("rl-vllm", imports=("PIL", "torchvision")),  # They come with vLLM.
    image_problem=image_problem,
    draft_model=_draft_model,
    draft_head=_draft_head,
    preflight="rl_vllm.preflight:problems",
)
"""The generator, found by the entry point `rl.generators:vllm`."""
