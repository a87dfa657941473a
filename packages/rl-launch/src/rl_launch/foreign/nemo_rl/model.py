"""The sections of NeMo RL with a model: `policy`, `value` and `teacher`, and their `megatron_cfg`."""

from __future__ import annotations

from rl_launch.foreign.nemo_rl.data import has_images
from rl_launch.foreign.nemo_rl.generation import take_variable
from rl_launch.foreign.nemo_rl.optimizer import translate_optimizer
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_FIELDS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "fine_grained_activation_offloading",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "offload_modules",
)
"""Keys of `megatron_cfg` that are fields of Megatron's config, passed on by `megatron_kwargs`."""

_OF_TRANSFORMER_ENGINE = ("apply_rope_fusion", "gradient_accumulation_fusion", "moe_permute_fusion")
"""Fields of layers that have no adapters."""

_ON = ("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion")
"""Fields that are on unless `megatron_kwargs` turns them off."""


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
"""Parts of Megatron's layers in Hugging Face models."""


def translate_megatron(config: Translation, model: str) -> None:
    """Answer the keys of `megatron_cfg` of a model that Megatron trains.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        model: Key of the model's section.
    """
    section = f"{model}.megatron_cfg"
    adapts = bool(config.get(f"{section}.peft.enabled"))
    fields = [f"{section}.{name}" for name in _FIELDS]
    fields += [key for key in config.keys(f"{section}.model_overrides") if key != f"{section}.model_overrides"]
    # A key that neither system has is a field of Megatron's config, which the backend accepts or refuses by name.
    fields += [key for key in config.keys(section) if key.count(".") == 2 and not config.is_known(key)]
    for key in fields:
        name, value = key.rpartition(".")[2], config.get(key)
        here = f"{section}.megatron_kwargs.{name}"
        is_off = value in (None, [], False) and not (value is False and name in _ON)
        if is_off or (adapts and name in _OF_TRANSFORMER_ENGINE):
            config.unneeded(key, "adapters do not have this kernel" if adapts and value else "off")
        else:
            config.put(here, value)
            config.answer(key, Kind.RENAMED, here)
    weight = f"{section}.mtp_loss_scaling_factor"
    if config.get(weight) and config.get(f"{section}.mtp_num_layers") and config.get(f"{section}.mtp_detach_heads"):
        config.unneeded(weight, "the layers only draft tokens, and their loss does not reach the policy")
        config.notes.append(
            f"{section}.mtp_*: the layers that draft tokens are not trained. policy.draft_head trains them for "
            "speculative decoding, with dtensor_cfg"
        )
    elif not config.get(f"{section}.mtp_num_layers"):
        config.unneeded(weight, "the model has no such layers")
    _experts(config, section)
    if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_model_parallel_size", 1) == 1:
        config.unneeded(f"{section}.sequence_parallel", "there is only one tensor-parallel rank")
    # Answer the three keys of recomputation, which are two here.
    switch, granularity, modules = (
        f"{section}.{name}" for name in ("activation_checkpointing", "recompute_granularity", "recompute_modules")
    )
    here = f"{section}.recompute"
    if config.keys(switch):
        config.put(here, config.get(granularity, "full") if config.get(switch) else "none")
        config.answer(switch, Kind.RENAMED, here)
    if config.written(here) in ("full", "selective"):
        config.follows([granularity], here)
    config.unneeded(granularity, "nothing is recomputed")
    if config.written(here) != "selective" or not config.get(modules):
        config.unneeded(modules, f"{here} is not selective, or the default suffices")


def _experts(config: Translation, section: str) -> None:
    experts = config.get(f"{section}.expert_model_parallel_size", 1)
    tensor = config.get(f"{section}.tensor_model_parallel_size", 1)
    if experts == 1:
        config.unneeded(f"{section}.expert_tensor_parallel_size", "experts are not sharded over ranks")
    parallel = f"{section}.sequence_parallel"
    if experts > 1 and tensor > 1 and not config.get(parallel):
        config.put(parallel, True)
        config.follows([parallel], f"{parallel}: true; otherwise Megatron does not spread experts over such ranks")
    dispatcher, dtype = f"{section}.moe_token_dispatcher_type", config.get(f"{section}.moe_router_dtype") or "fp32"
    is_flexible = config.get(dispatcher) == "flex" or config.get(f"{section}.moe_enable_deepep")
    if is_flexible or config.get(dispatcher) == "allgather":
        may_be_flexible = is_flexible and dtype == "fp32" and experts * tensor > 1
        config.put(dispatcher, "flex" if may_be_flexible else "alltoall")
        config.follows([dispatcher], f"{dispatcher}: {config.written(dispatcher)}, which computes the same")
    config.follows([f"{section}.moe_enable_deepep"], f"{dispatcher}")
    for name in ("moe_flex_dispatcher_backend", "moe_hybridep_num_sms"):
        key = f"{section}.{name}"
        if config.get(key) is not None and config.written(dispatcher) == "flex":
            config.rename(key, f"{section}.megatron_kwargs.{name}")
        config.unneeded(key, f"{dispatcher} is not flex")
    _balancing(config, section, experts)
    rate = f"{section}.moe_router_bias_update_rate"
    if config.get(rate) and experts == 1:
        config.unneeded(rate, "a model without experts has no router biases")
    elif config.get(rate):
        config.notes.append(
            f"{rate}: remove it if the routers of the model have no biases, as those of DeepSeek-V3 have"
        )


def _balancing(config: Translation, section: str, experts: int) -> None:
    """Answer the loss that balances experts, whose weight is a field of the model's own config."""
    key, model = f"{section}.moe_router_load_balancing_type", section.partition(".")[0]
    overrides = config.get(f"{model}.hf_config_overrides") or {}
    weights = [each.get("router_aux_loss_coef") for each in (overrides, overrides.get("text_config") or {})]
    weight = next((each for each in weights if each is not None), None)
    if config.get(key, "none") == "none":
        return
    if weight:
        config.put(f"{section}.moe_aux_loss_coeff", weight)
        config.notes.append(f"{section}.moe_aux_loss_coeff is router_aux_loss_coef of {model}.hf_config_overrides")
        return
    if weight == 0:
        config.unneeded(key, "its weight, router_aux_loss_coef, is 0")
    elif config.get(f"{section}.freeze_moe_router"):
        config.unneeded(key, "the routers are frozen")
    elif experts == 1:
        config.unneeded(key, "a model without experts does not have this loss")
        config.notes.append(
            f"{key}: if the model has experts, set it, and {section}.moe_aux_loss_coeff to the model's own weight"
        )
    else:
        name = key.partition(".")[2]
        text = f"a balancing loss of unknown weight ({name}): set it to none, or give"
        config.refuse(key, f"{text} hf_config_overrides.router_aux_loss_coef")


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
    if backend == "megatron_cfg":
        config.put(f"{model}.megatron_cfg.enabled", True)
    config.follows([f"{model}.{name}.enabled" for name in _BACKENDS], f"{model}.{backend}, the selected backend")
    config.unneeded(f"{model}.{other}", f"{model} trains with {backend}")
    for key in config.keys(f"{model}.{backend}.env_vars"):
        take_variable(config, key, f"{model}.env_vars")
    _tokenizer(config, model)
    translate_optimizer(config, model, backend)
    _adapters(config, model, backend)
    _batching(config, model)
    if backend == "megatron_cfg":
        translate_megatron(config, model)
    else:
        section = f"{model}.dtensor_cfg"
        attention = config.get(f"{section}.automodel_kwargs.attn_implementation")
        if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
            config.put(f"{section}.attention_backend", attention)
        if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_parallel_size", 1) == 1:
            config.unneeded(f"{section}.sequence_parallel", "there is only one tensor-parallel rank")
        if config.get(f"{section}.custom_parallel_plan"):
            config.notes.append(f"{section}.custom_parallel_plan: the model's own plan is used")
    _overrides(config, model)
    # Answer the parts of a model of text and images: without images, only the language model is loaded and trained.
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
                config.compute(key, f"policy.vision.{part}", "frozen" if config.get(key) else "trained")
            else:
                config.unneeded(key, "only the language model is loaded (policy.vision.enabled is false)")
    if config.get(f"{model}.router_replay.enabled"):
        config.put(f"{model}.{backend}.moe_router_replay", True)


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
        plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        config.compute(template, template, plain, f"{template}: the plain text of all messages")
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
    config.compute(f"{model}.sequence_packing.enabled", f"{model}.sequence_packing.enabled", packs)
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
