"""The sections of NeMo RL that hold a model: `policy`, `value` and `teacher`."""

from __future__ import annotations

from rl_launch.foreign.nemo_rl.data import has_images
from rl_launch.foreign.nemo_rl.generation import take_variable
from rl_launch.foreign.nemo_rl.megatron import translate_megatron
from rl_launch.foreign.nemo_rl.optimizer import translate_optimizer
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_BACKENDS = ("dtensor_cfg", "megatron_cfg")

_FROZEN = {
    "freeze_vision_tower": "tower",
    "freeze_vision_model": "tower",
    "freeze_vision_projection": "projector",
    "freeze_audio_tower": "",
    "freeze_sound_encoder": "",
    "freeze_sound_projection": "",
    "freeze_language_model": "",
}
"""Keys that freeze a part of a model, and the key of the part in `policy.vision`; empty if it has none."""

_UNUSED_BY_TEACHERS = (
    "generation", "optimizer", "scheduler", "train_global_batch_size", "train_micro_batch_size", "max_grad_norm",
    "megatron_cfg.optimizer", "megatron_cfg.scheduler", "megatron_cfg.distributed_data_parallel_config",
    "megatron_cfg.peft", "dtensor_cfg.lora_cfg", "megatron_cfg.activation_checkpointing",
    "dtensor_cfg.activation_checkpointing", "dynamic_batching.train_mb_tokens", "sequence_packing.train_mb_tokens",
)  # fmt: skip

_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Layers of Megatron by the names of those that they are made of in Hugging Face models."""


def translate_model(config: Translation, model: str) -> None:
    """Answer the keys of a model.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        model: Key of the model's section.
    """
    if model == "teacher":
        for name in _UNUSED_BY_TEACHERS:
            config.unneeded(f"teacher.{name}", "the teacher is not trained and does not generate")
    enabled = next((name for name in _BACKENDS if config.get(f"{model}.{name}.enabled")), None)
    backend = enabled or "dtensor_cfg"
    other = "dtensor_cfg" if enabled == "megatron_cfg" else "megatron_cfg"
    trains = "dtensor_cfg" if model == "policy" and has_images(config) else backend
    if trains == "megatron_cfg":
        config.put(f"{model}.megatron_cfg.enabled", True)
    elif backend == "megatron_cfg":
        _replace_megatron(config, model)
    config.follows([f"{model}.{name}.enabled" for name in _BACKENDS], f"{model}.{backend}, the selected backend")
    config.unneeded(f"{model}.{other}", f"{model} trains with {backend}")
    for key in config.keys(f"{model}.{backend}.env_vars"):
        take_variable(config, key, f"{model}.env_vars")
    _tokenizer(config, model)
    translate_optimizer(config, model, backend)
    _adapters(config, model, backend)
    _batching(config, model)
    if trains == "megatron_cfg":
        translate_megatron(config, model)
    else:
        _dtensor(config, model)
    _overrides(config, model)
    _vision(config, model)
    if config.get(f"{model}.router_replay.enabled"):
        config.put(f"{model}.{backend}.moe_router_replay", True)


def _replace_megatron(config: Translation, model: str) -> None:
    """Train a model with images by PyTorch's own parallelism, because Megatron takes no images here."""
    sizes = f"{model}.megatron_cfg.tensor_model_parallel_size"
    config.put(f"{model}.dtensor_cfg.tensor_parallel_size", config.get(sizes, 1))
    config.follows([sizes], f"{model}.dtensor_cfg.tensor_parallel_size")
    config.notes.append(f"{model}.dtensor_cfg: trains in the place of megatron_cfg, which does not take images")
    for key in config.keys(f"{model}.megatron_cfg"):
        if not key.startswith((f"{model}.megatron_cfg.optimizer", f"{model}.megatron_cfg.scheduler")):
            config.unneeded(key, f"{model} trains with dtensor_cfg")


def _vision(config: Translation, model: str) -> None:
    """Answer the parts of a model of text and images: without images, only the language model is loaded and trained."""
    is_on = model == "policy" and has_images(config)
    if is_on:
        for name, value in (("enabled", True), ("tower", "trained"), ("projector", "trained")):
            config.put(f"policy.vision.{name}", value)
        config.unneeded("grpo.deduplicate_multimodal_data", "images are kept once")
    for section in ("dtensor_cfg.automodel_kwargs.freeze_config", "megatron_cfg.freeze_config", "megatron_cfg"):
        for name, part in _FROZEN.items():
            key = f"{model}.{section}.{name}"
            if not config.has(key):
                continue
            if name == "freeze_language_model":
                if config.get(key):
                    config.refuse(key, "a language model that is not trained (freeze_language_model)")
                config.unneeded(key, "the language model is trained")
            elif is_on and part:
                config.put(f"policy.vision.{part}", "frozen" if config.get(key) else "trained")
                config.follows([key], f"policy.vision.{part}")
            else:
                config.unneeded(key, "only the language model is loaded (policy.vision.enabled is false)")


def _tokenizer(config: Translation, model: str) -> None:
    section = f"{model}.tokenizer"
    own = config.get(f"{model}.model_name")
    name, template = config.get(f"{section}.name"), f"{section}.chat_template"
    if model != "policy":
        if config.get(f"{model}.megatron_cfg") is not None and name not in (None, own):
            config.refuse(f"{section}.name", f"a tokenizer of {model} that differs from the tokenizer of its model")
        config.unneeded(section, "policy.tokenizer produces all tokens")
        return
    if name == own:
        config.unneeded(f"{section}.name", "the default is the model's own")
    if template not in config.keys(section):
        return
    text = config.get(template)
    if text is None:
        config.put(template, "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    elif text == "default" or text in (f"{own}/chat_template.jinja", f"{name}/chat_template.jinja"):
        config.unneeded(template, "the default is the tokenizer's own")


def _adapters(config: Translation, model: str, backend: str) -> None:
    section = f"{model}.{backend}." + ("lora_cfg" if backend == "dtensor_cfg" else "peft")
    here = f"{model}.lora_cfg"
    if not config.get(f"{section}.enabled"):
        config.unneeded(section, "no adapters are trained")
        return
    targets, left_out = config.get(f"{section}.target_modules", []), config.get(f"{section}.exclude_modules", [])
    if targets and not config.get(f"{section}.match_all_linear", False):
        config.put(f"{here}.match_all_linear", False)
        config.put(f"{here}.target_modules", _layers(targets))
    if left_out:
        config.put(f"{here}.exclude_modules", _layers(left_out))
    for name, given in (("target_modules", targets), ("exclude_modules", left_out)):
        if any("*" in each.strip("*") for each in given):
            config.refuse(f"{section}.{name}", "patterns with * inside the name of an adapted layer")
    position = config.get(f"{section}.dropout_position", "pre")
    if config.get(f"{section}.dropout", 0) and position != "pre":
        config.refuse(f"{section}.dropout_position", "dropout after an adapter (dropout_position: post)")
    config.unneeded(f"{section}.dropout_position", "there is no dropout, or it is before the adapter, as here")


def _layers(names: list[str]) -> list[str]:
    plain = [name.strip("*").rpartition(".")[2] for name in names]
    return [layer for name in plain for layer in _LINEAR.get(name, (name,))]


def _batching(config: Translation, model: str) -> None:
    """Answer packing and dynamic batching: packing is on here unless it is turned off."""
    packs = bool(config.get(f"{model}.sequence_packing.enabled"))
    config.put(f"{model}.sequence_packing.enabled", packs)
    config.follows([f"{model}.sequence_packing.enabled"], f"{model}.sequence_packing.enabled")
    total = config.get(f"{model}.max_total_sequence_length")
    for batching in ("sequence_packing", "dynamic_batching"):
        if not config.get(f"{model}.{batching}.enabled"):
            for key in config.keys(f"{model}.{batching}"):
                if not key.endswith(".enabled"):
                    config.unneeded(key, f"{model}.{batching} is off")
        for name, rows in (("train_mb_tokens", "train_micro_batch_size"), ("logprob_mb_tokens", "logprob_batch_size")):
            key = f"{model}.{batching}.{name}"
            if total and config.get(key) == total * config.get(f"{model}.{rows}", 0):
                config.unneeded(key, f"it is {model}.max_total_sequence_length x {model}.{rows}, the default")


def _dtensor(config: Translation, model: str) -> None:
    section = f"{model}.dtensor_cfg"
    attention = config.get(f"{section}.automodel_kwargs.attn_implementation")
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        config.put(f"{section}.attention_backend", attention)
    if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_parallel_size", 1) == 1:
        config.unneeded(f"{section}.sequence_parallel", "there is only one tensor-parallel rank")
    if config.get(f"{section}.custom_parallel_plan"):
        config.notes.append(f"{section}.custom_parallel_plan: the model's own plan is used")


def _overrides(config: Translation, model: str) -> None:
    """Write older names of rotary embeddings by the present ones."""
    section = f"{model}.hf_config_overrides"
    values = config.get(section)
    if not isinstance(values, dict) or not values:
        return
    renewed = {name: value for name, value in values.items() if name not in ("rope_scaling", "rope_theta")}
    rope = dict(values.get("rope_scaling") or {})
    if "rope_theta" in values:
        rope["rope_theta"] = values["rope_theta"]
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if rope:
        renewed["rope_parameters"] = rope
    renewed.pop("router_aux_loss_coef", None)
    if isinstance(renewed.get("text_config"), dict):
        text = {k: v for k, v in renewed["text_config"].items() if k != "router_aux_loss_coef"}
        renewed = {**renewed, "text_config": text} if text else {k: v for k, v in renewed.items() if k != "text_config"}
    if renewed:
        config.put(section, renewed)
    for key in config.keys(section):
        if key.endswith("router_aux_loss_coef"):
            config.follows([key], f"{model}.megatron_cfg.moe_aux_loss_coeff, of which 0 is the default")
        elif "rope_scaling" in key or key.endswith("rope_theta"):
            config.follows([key], f"{section}.rope_parameters")
        else:
            config.answer(key, Kind.SAME, key)
