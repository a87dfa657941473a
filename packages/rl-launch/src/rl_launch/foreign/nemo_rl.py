"""Configs of NeMo RL: what is worked out from several keys. The others are in `tables/nemo-rl.yaml`."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.nemo_rl_data import translate_data
from rl_launch.foreign.nemo_rl_evaluation import translate_evaluation
from rl_launch.foreign.schedules import MegatronSchedule, scaled
from rl_launch.foreign.table import Kind
from rl_launch.foreign.translation import Translation

ALGORITHMS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "rm": "rm", "distillation": "distillation"}
"""Sections of NeMo RL that choose the script, and the algorithm here."""

_ROLLOUTS = ("grpo", "ppo", "distillation")
_BACKENDS = ("dtensor_cfg", "megatron_cfg")
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
"""Those of layers that adapters do not sit on."""

_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Layers of Megatron by the names of those that they are made of in Hugging Face models."""

_METRICS = {
    "accuracy": "val:accuracy",
    "loss": "val:loss",
    "val_loss": "val:loss",
    "reward": "val:accuracy",
    "mean_length": "val:mean_length",
}
_GENERATORS = {"vllm", "hf", "megatron"}
_OPTIMIZERS = {"adam": "torch.optim.AdamW", "adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
_EVALUATION = ("eval", "generation")


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm of a config by its sections; empty if none of them says."""
    found = [name for key, name in ALGORITHMS.items() if isinstance(values.get(key), dict)]
    if not found and all(isinstance(values.get(key), dict) for key in _EVALUATION):
        return "evaluation"
    return found[0] if len(found) == 1 else "grpo" if "grpo" in found else ""


def translate(config: Translation) -> None:
    """Answer the keys that need more than a table, then the others."""
    config.put("algorithm", config.algorithm)
    if config.algorithm == "evaluation":
        translate_evaluation(config)
        config.finish()
        _cluster(config)
        return
    _off_policy_distillation(config)
    _asynchrony(config)
    _generation(config)
    for model in ("policy", "value", "teacher"):
        if isinstance(config.values.get(model), dict):
            _model(config, model)
    _pairs(config)
    _algorithm(config)
    _loss(config)
    translate_data(config)
    _environments(config)
    _validation(config)
    _trackers(config)
    config.finish()
    _cluster(config)


def _off_policy_distillation(config: Translation) -> None:
    if config.get("teachers"):
        for section in ("teachers", "teacher", "token_aligner", "distillation"):
            config.refuse(section, "distillation of logits across tokenizers from given text (teachers, xtoken)")
    if config.get("on_policy_distillation.enabled"):
        config.refuse("on_policy_distillation", "distillation on policy inside GRPO (on_policy_distillation)")


def _asynchrony(config: Translation) -> None:
    """The single controller's settings of how far generation runs ahead."""
    section = f"{config.algorithm}.async_grpo"
    for old in ("async_ppo", "async_distillation"):
        if config.get(f"{config.algorithm}.{old}.enabled") is False:
            for key in config.keys(f"{config.algorithm}.{old}"):
                config.unneeded(key, "the run is synchronous")
    if not config.has("async_rl"):
        return
    sampler = config.get("async_rl.sampler.name", "windowed")
    lead = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
    age = config.get(f"async_rl.sampler.{lead}", 0)
    if sampler not in ("windowed", "in_order"):
        config.refuse(
            "async_rl.sampler.name", f"training on the groups that are ready first (async_rl.sampler {sampler})"
        )
    elif age:
        config.put(f"{section}.enabled", True)
        config.put(f"{section}.max_trajectory_age_steps", age)
        config.put(f"{section}.in_flight_weight_updates", True)
        if config.get("async_rl.recompute_kv_cache_after_weight_updates") is False:
            config.put(f"{section}.recompute_kv_cache_after_weight_updates", False)
    for key in config.keys("async_rl"):
        rule = config.table.rule(key)
        if rule is not None:
            config.answer(key, rule.kind, rule.text)


def _generation(config: Translation) -> None:
    section = "policy.generation"
    if config.algorithm not in _ROLLOUTS:
        for key in config.keys(section):
            config.unneeded(key, f"{config.algorithm} generates nothing")
        return
    backend = config.get(f"{section}.backend", "vllm")
    if backend not in _GENERATORS:
        names = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "dynamo": "Dynamo"}
        config.refuse(f"{section}.backend", f"generation by {names.get(backend, backend)}")
        for key in config.keys(f"{section}.{backend}_cfg"):
            config.refuse(key, f"generation by {names.get(backend, backend)}")
    if backend != "vllm":
        for name in ("vllm_cfg", "vllm_kwargs"):
            for key in config.keys(f"{section}.{name}"):
                config.unneeded(key, f"{section}.backend is {backend}")
    if backend == "megatron":
        own = config.get(f"{section}.mcore_generation_config.tensor_model_parallel_size")
        size = own or config.get("policy.megatron_cfg.tensor_model_parallel_size", 1)
        config.put(f"{section}.megatron_cfg.tensor_model_parallel_size", size)
        config.follows(
            [f"{section}.mcore_generation_config.tensor_model_parallel_size"],
            f"{section}.megatron_cfg.tensor_model_parallel_size",
        )
    _lengths(config, section)
    if backend == "vllm":
        _vllm(config, section)
    if config.get(f"{section}.colocated.enabled", True):
        for key in config.keys(f"{section}.colocated.resources"):
            config.unneeded(key, "generation shares the policy's devices")
    elif config.get(f"{section}.colocated.resources.num_nodes") and config.get("cluster.num_nodes", 1) == 1:
        config.unneeded(f"{section}.colocated.resources.num_nodes", "there is one node")
    for key in config.keys(section):
        if key.startswith(f"{section}.val_top_k") or key.endswith(".top_k"):
            if config.get(key, 0) == -1:
                config.unneeded(key, "-1 samples from all tokens, which is the default")


def _lengths(config: Translation, section: str) -> None:
    """Have a row leave room for a prompt: a bound of a completion that equals that of a row bounds nothing."""
    total = config.get("policy.max_total_sequence_length")
    longest = config.get(f"{section}.max_new_tokens")
    if total and longest and longest >= total:
        config.put(f"{section}.max_new_tokens", total - 1)
        config.follows(
            [f"{section}.max_new_tokens"],
            f"{section}.max_new_tokens: {total - 1}; a row has at least one token of a prompt",
        )
    room, key = config.get(f"{section}.vllm_cfg.max_model_len"), f"{section}.vllm_cfg.max_model_len"
    if total and room and room >= total:
        config.unneeded(key, "it follows policy.max_total_sequence_length")


def _vllm(config: Translation, section: str) -> None:
    engine, further = f"{section}.vllm_cfg", f"{section}.vllm_cfg.vllm_kwargs"
    precision, policy = config.get(f"{engine}.precision"), config.get("policy.precision", "bfloat16")
    if precision in ("fp8", "mxfp8"):
        config.put(f"{further}.quantization", precision)
        config.put(f"{section}.canary_tolerance", 0.5)
        config.follows(
            [f"{engine}.precision"],
            f"{further}.quantization, and {section}.canary_tolerance, for logprobs that 8 bits round",
        )
    elif precision in (None, policy):
        config.unneeded(f"{engine}.precision", "it is policy.precision")
    else:
        config.refuse(f"{engine}.precision", f"generation in {precision} beside training in {policy}")
    experts = config.get(f"{engine}.expert_parallel_size", 1)
    if experts == 1:
        config.unneeded(f"{engine}.expert_parallel_size", "experts are not spread over ranks")
    else:
        config.put(f"{further}.enable_expert_parallel", True)
        text = f"{further}.enable_expert_parallel, over the tensor-parallel ranks of a replica"
        config.follows([f"{engine}.expert_parallel_size"], text)
    room = config.get(f"{section}.vllm_kwargs.kv_cache_memory_bytes")
    if room:
        config.put(f"{engine}.kv_cache_gib", room / 2**30)
        config.follows([f"{section}.vllm_kwargs.kv_cache_memory_bytes"], f"{engine}.kv_cache_gib")
    for name in ("precision", "dtype"):
        if name in (config.get(f"{section}.vllm_kwargs") or {}):
            config.unneeded(f"{section}.vllm_kwargs.{name}", "it is policy.precision")
    for key in config.keys(f"{section}.vllm_kwargs"):
        rule = config.table.rule(key)
        if rule is not None and rule.kind is Kind.FOLLOWS and config.get(key) is not None:
            config.rename(key, key.replace(f"{section}.vllm_kwargs", further))
    for key in config.keys(f"{engine}.env_vars"):
        _variable(config, key, f"{section}.env_vars")


def _variable(config: Translation, key: str, here: str) -> None:
    """Take an environment variable over, as text."""
    name, value = key.rpartition(".")[2], config.get(key)
    if name.startswith("NRL_"):
        config.unneeded(key, "it is read by NeMo RL alone")
    elif value is not None and not isinstance(value, dict):
        config.put(f"{here}.{name}", str(value))
        config.answer(key, Kind.RENAMED, f"{here}.{name}")


def _model(config: Translation, model: str) -> None:
    if model == "teacher":
        _teacher(config)
    backend = next((name for name in _BACKENDS if config.get(f"{model}.{name}.enabled")), None)
    other = {"dtensor_cfg": "megatron_cfg", "megatron_cfg": "dtensor_cfg"}.get(backend or "", "megatron_cfg")
    backend = backend or "dtensor_cfg"
    if backend == "megatron_cfg":
        config.put(f"{model}.megatron_cfg.enabled", True)
    config.follows([f"{model}.{name}.enabled" for name in _BACKENDS], f"{model}.{backend}, the backend that is chosen")
    for key in config.keys(f"{model}.{other}"):
        config.unneeded(key, f"{model} trains with {backend}")
    for key in config.keys(f"{model}.{backend}.env_vars"):
        _variable(config, key, f"{model}.env_vars")
    _tokenizer(config, model)
    _optimizer(config, model, backend)
    _adapters(config, model, backend)
    _batching(config, model)
    if backend == "megatron_cfg":
        _megatron(config, model)
    else:
        _dtensor(config, model)
    _overrides(config, model)
    if config.get(f"{model}.router_replay.enabled"):
        config.put(f"{model}.{backend}.moe_router_replay", True)
        config.follows([f"{model}.router_replay.enabled"], f"{model}.{backend}.moe_router_replay")


def _teacher(config: Translation) -> None:
    reason = "the teacher is not trained and generates nothing"
    for name in (
        "generation",
        "optimizer",
        "scheduler",
        "train_global_batch_size",
        "train_micro_batch_size",
        "max_grad_norm",
        "megatron_cfg.optimizer",
        "megatron_cfg.scheduler",
        "megatron_cfg.distributed_data_parallel_config",
        "megatron_cfg.peft",
        "dtensor_cfg.lora_cfg",
        "megatron_cfg.activation_checkpointing",
        "dtensor_cfg.activation_checkpointing",
        "dynamic_batching.train_mb_tokens",
        "sequence_packing.train_mb_tokens",
    ):
        for key in config.keys(f"teacher.{name}"):
            config.unneeded(key, reason)


def _tokenizer(config: Translation, model: str) -> None:
    section = f"{model}.tokenizer"
    own = config.get(f"{model}.model_name")
    name, template = config.get(f"{section}.name"), f"{section}.chat_template"
    if model != "policy":
        if config.get(f"{model}.megatron_cfg") is not None and name not in (None, own):
            config.refuse(f"{section}.name", f"another tokenizer of {model} than that of its model")
        for key in config.keys(section):
            config.unneeded(key, "policy.tokenizer makes all tokens")
        return
    if name == own:
        config.unneeded(f"{section}.name", "it is the model's own")
    if template not in config.keys(section):
        return
    text = config.get(template)
    if text is None:
        config.put(template, "{% for message in messages %}{{ message['content'] }}{% endfor %}")
        config.follows([template], f"{template}: the plain text of all messages")
    elif text == "default" or text in (f"{own}/chat_template.jinja", f"{name}/chat_template.jinja"):
        config.unneeded(template, "it is the tokenizer's own")


def _updates_per_step(config: Translation, model: str) -> int:
    """Optimizer steps of one step of the loop."""
    loop = config.algorithm
    rows = config.get(f"{loop}.num_prompts_per_step", 0) * config.get(f"{loop}.num_generations_per_prompt", 0)
    batch = config.get(f"{model}.train_global_batch_size", 0)
    passes = config.get("ppo.ppo_epochs", 1) if loop == "ppo" else 1
    return max(1, rows // batch if batch else 1) * passes


def _optimizer(config: Translation, model: str, backend: str) -> None:
    if f"{model}.optimizer" in config.keys(f"{model}.optimizer"):
        config.unneeded(f"{model}.optimizer", "null; Megatron's optimizer holds")
    if f"{model}.scheduler" in config.keys(f"{model}.scheduler") and config.get(f"{model}.scheduler") is None:
        config.unneeded(f"{model}.scheduler", "null; the rate is constant")
    if model == "teacher":
        return
    updates = _updates_per_step(config, model)
    if backend == "megatron_cfg":
        for name in ("optimizer", "scheduler"):
            for key in config.keys(f"{model}.{name}"):
                config.unneeded(key, f"{model} trains with megatron_cfg, whose own {name} holds")
        _megatron_optimizer(config, model, updates)
        return
    name = config.get(f"{model}.optimizer.name", "torch.optim.AdamW")
    if not name.startswith("torch.optim."):
        config.refuse(f"{model}.optimizer.name", f"the optimizer {name}")
        for key in config.keys(f"{model}.optimizer"):
            config.refuse(key, f"the optimizer {name}")
    schedules = config.get(f"{model}.scheduler")
    if isinstance(schedules, dict) and "name" in schedules:
        schedules = [schedules]
    if isinstance(schedules, list):
        schedules = [each for each in schedules if each.get("name") or each.get("milestones")]
        config.put(f"{model}.scheduler", scaled(schedules, updates))
        key = f"{model}.scheduler"
        kind, text = (Kind.SAME, key) if updates == 1 else (Kind.FOLLOWS, _counted(key, updates))
        config.answer(key, kind, text)


def _counted(key: str, updates: int) -> str:
    return f"{key}, counted in optimizer steps, of which a step has {updates}"


def _megatron_optimizer(config: Translation, model: str, updates: int) -> None:
    section = f"{model}.megatron_cfg.optimizer"
    if not config.has(section):
        return
    values = config.get(section) or {}
    kind = _OPTIMIZERS.get(str(values.get("optimizer", "adam")))
    if kind is None:
        config.refuse(f"{section}.optimizer", f"Megatron's optimizer {values.get('optimizer')}")
        return
    arguments: dict[str, Any] = {"lr": values.get("lr", 1e-6), "weight_decay": values.get("weight_decay", 0.0)}
    if kind == "torch.optim.SGD":
        arguments["momentum"] = values.get("sgd_momentum", 0.0)
    else:
        arguments["betas"] = [values.get("adam_beta1", 0.9), values.get("adam_beta2", 0.999)]
        arguments["eps"] = values.get("adam_eps", 1e-8)
    config.put(f"{model}.optimizer.name", kind)
    config.put(f"{model}.optimizer.kwargs", arguments)
    clip = values.get("clip_grad", config.get(f"{model}.max_grad_norm"))
    config.put(f"{model}.max_grad_norm", clip or None)
    config.follows([f"{section}.clip_grad", f"{model}.max_grad_norm"], f"{model}.max_grad_norm")
    if values.get("params_dtype", "float32") not in ("float32", "torch.float32"):
        config.refuse(f"{section}.params_dtype", "master weights in 16 bits (optimizer.params_dtype)")
    if values.get("optimizer_cpu_offload") and model == "policy":
        config.notes.append(f"{section}.optimizer_cpu_offload: the optimizer's state stays on the GPUs")
    used = ["optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "min_lr"]
    config.follows([f"{section}.{name}" for name in used], f"{model}.optimizer")
    if values.get("params_dtype") is not None:
        config.unneeded(f"{section}.params_dtype", "master weights are float32")
    schedule = MegatronSchedule.of(values, config.get(f"{model}.megatron_cfg.scheduler") or {})
    problem = schedule.problem
    if problem:
        config.refuse(f"{model}.megatron_cfg.scheduler.{problem[0]}", problem[1])
    else:
        last = config.get(f"{config.algorithm}.max_num_steps", 1000)
        config.put(f"{model}.scheduler", scaled(schedule.torch_schedules(last), updates))
    for key in config.keys(f"{model}.megatron_cfg.scheduler"):
        text = f"{model}.scheduler" if updates == 1 else _counted(f"{model}.scheduler", updates)
        config.follows([key], text)


def _adapters(config: Translation, model: str, backend: str) -> None:
    section = f"{model}.{backend}." + ("lora_cfg" if backend == "dtensor_cfg" else "peft")
    here = f"{model}.lora_cfg"
    if not config.get(f"{section}.enabled"):
        for key in config.keys(section):
            config.unneeded(key, "no adapters are trained")
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
        config.follows([f"{section}.{name}"], f"{here}.{name}, by the names of Hugging Face")
    position = config.get(f"{section}.dropout_position", "pre")
    if config.get(f"{section}.dropout", 0) and position != "pre":
        config.refuse(f"{section}.dropout_position", "dropout behind an adapter (dropout_position: post)")
    config.unneeded(f"{section}.dropout_position", "there is no dropout, or it is before the adapter as here")


def _layers(names: list[str]) -> list[str]:
    plain = [name.strip("*").rpartition(".")[2] for name in names]
    return [layer for name in plain for layer in _LINEAR.get(name, (name,))]


def _batching(config: Translation, model: str) -> None:
    """Packing and dynamic batching: packing is on here unless it is turned off."""
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
    known = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
    if attention in known:
        config.put(f"{section}.attention_backend", attention)
        config.follows([f"{section}.automodel_kwargs.attn_implementation"], f"{section}.attention_backend")
    if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_parallel_size", 1) == 1:
        config.unneeded(f"{section}.sequence_parallel", "there is one tensor-parallel rank")
    if config.get(f"{section}.expert_parallel_size", 1) > 1 and config.get(f"{section}.tensor_parallel_size", 1) > 1:
        config.refuse(f"{section}.expert_parallel_size", "expert with tensor parallelism on dtensor_cfg")
    if config.get(f"{section}.custom_parallel_plan"):
        config.notes.append(f"{section}.custom_parallel_plan: the model's own plan is used")


def _megatron(config: Translation, model: str) -> None:
    section = f"{model}.megatron_cfg"
    adapts = bool(config.get(f"{section}.peft.enabled"))
    fields = [f"{section}.{name}" for name in _FIELDS]
    fields += [key for key in config.keys(f"{section}.model_overrides") if key != f"{section}.model_overrides"]
    for key in fields:
        name, value = key.rpartition(".")[2], config.get(key)
        here = f"{section}.megatron_kwargs.{name}"
        if value in (None, False, []) or (adapts and name in _OF_TRANSFORMER_ENGINE):
            reason = "adapters have no such kernel" if adapts and value else "off"
            config.unneeded(key, reason)
        else:
            config.put(here, value)
            config.answer(key, Kind.RENAMED, here)
    _experts(config, section)
    if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_model_parallel_size", 1) == 1:
        config.unneeded(f"{section}.sequence_parallel", "there is one tensor-parallel rank")
    if not config.get(f"{section}.activation_checkpointing") or not config.get(f"{section}.recompute_modules"):
        config.unneeded(f"{section}.recompute_modules", "core_attn, the default")
    if not config.get(f"{section}.activation_checkpointing"):
        config.unneeded(f"{section}.recompute_granularity", "nothing is computed again")
    elif config.get(f"{section}.recompute_granularity", "full") == "full":
        config.unneeded(f"{section}.recompute_modules", "whole layers are computed again")


def _experts(config: Translation, section: str) -> None:
    experts = config.get(f"{section}.expert_model_parallel_size", 1)
    tensor = config.get(f"{section}.tensor_model_parallel_size", 1)
    if experts == 1:
        config.unneeded(f"{section}.expert_tensor_parallel_size", "experts are not spread over ranks")
    if experts > 1 and tensor > 1 and not config.get(f"{section}.sequence_parallel"):
        config.put(f"{section}.sequence_parallel", True)
        text = f"{section}.sequence_parallel: true, without which Megatron does not spread experts over such ranks"
        config.follows([f"{section}.sequence_parallel"], text)
    dispatcher, dtype = f"{section}.moe_token_dispatcher_type", config.get(f"{section}.moe_router_dtype") or "fp32"
    is_flexible = config.get(dispatcher) == "flex" or config.get(f"{section}.moe_enable_deepep")
    may_be = dtype == "fp32" and experts * tensor > 1
    if is_flexible and may_be:
        config.put(dispatcher, "flex")
    elif is_flexible or config.get(dispatcher) == "allgather":
        config.put(dispatcher, "alltoall")
    if is_flexible or config.get(dispatcher) == "allgather":
        config.follows([dispatcher], f"{dispatcher}: {config.written(dispatcher)}, which computes the same")
    config.follows([f"{section}.moe_enable_deepep"], f"{dispatcher}")
    for name in ("moe_flex_dispatcher_backend", "moe_hybridep_num_sms"):
        key = f"{section}.{name}"
        if config.get(key) is not None and config.written(dispatcher) == "flex":
            config.rename(key, f"{section}.megatron_kwargs.{name}")
        config.unneeded(key, f"{dispatcher} is not flex")
    _balancing(config, section, experts)


def _balancing(config: Translation, section: str, experts: int) -> None:
    """The loss that balances experts, whose weight is a field of the model's own config."""
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
        config.unneeded(key, "a model without experts has no such loss")
        config.notes.append(
            f"{key}: if the model has experts, set it, and {section}.moe_aux_loss_coeff to the model's own weight"
        )
    else:
        config.refuse(
            key,
            f"a balancing loss of unknown weight ({key.partition('.')[2]}): set it to none, or give "
            "hf_config_overrides.router_aux_loss_coef",
        )


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


def _pairs(config: Translation) -> None:
    """Count microbatches of preferences in rows, two for a pair."""
    if config.algorithm not in ("dpo", "rm"):
        return
    for key, here in (
        ("policy.train_micro_batch_size", "policy.train_micro_batch_size"),
        ("policy.logprob_batch_size", "policy.logprob_batch_size"),
        (f"{config.algorithm}.val_micro_batch_size", "policy.logprob_batch_size"),
    ):
        count = config.get(key)
        if count is not None:
            config.put_default(here, 2 * count)
            config.follows([key], f"{here}, counted in rows, two for a pair")


def _algorithm(config: Translation) -> None:
    loop = config.algorithm
    if loop == "sft":
        config.put("sft.learn", "last" if config.get("sft.only_unmask_final") else "all")
        config.follows(["sft.only_unmask_final"], "sft.learn")
    if loop in ("dpo",):
        average = config.get("dpo.sft_average_log_probs")
        if average is None:
            config.unneeded("dpo.sft_average_log_probs", "it follows dpo.preference_average_log_probs")
    period = config.get(f"{loop}.val_period")
    if period is not None and period <= 0:
        config.put(f"{loop}.val_period", 0)
        config.follows([f"{loop}.val_period"], f"{loop}.val_period: 0, which does not validate")
    if loop == "ppo":
        _critic(config)
    if loop not in _ROLLOUTS:
        return
    section = f"{loop}.async_grpo"
    if not config.get(f"{section}.in_flight_weight_updates"):
        config.unneeded(f"{section}.recompute_kv_cache_after_weight_updates", "no completion is under way at an update")
    _estimator(config)
    shaping = config.get(f"{loop}.reward_shaping.enabled")
    if not shaping:
        for key in config.keys(f"{loop}.reward_shaping"):
            config.unneeded(key, "rewards are not shaped")
    if config.get(f"{loop}.reward_scaling.enabled") is False:
        for key in config.keys(f"{loop}.reward_scaling"):
            config.unneeded(key, "rewards are not scaled")


def _estimator(config: Translation) -> None:
    section = f"{config.algorithm}.adv_estimator"
    name = config.get(f"{section}.name")
    if config.algorithm != "grpo" or not config.has(section):
        return
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        value = config.get(f"{section}.{key}")
        if value is not None:
            config.put(f"grpo.{key}", value)
            config.follows([f"{section}.{key}", f"grpo.{key}"], f"grpo.{key}")
    baseline = config.get(f"{section}.minus_baseline", True)
    if name == "reinforce_plus_plus":
        config.put(f"{section}.name", "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus")
    elif name == "gdpo":
        config.put(f"{section}.name", "gdpo")
    elif name not in (None, "grpo"):
        config.refuse(f"{section}.name", f"the advantage estimator {name}")
    if config.written(f"{section}.name"):
        for key in ("normalize_rewards", "use_leave_one_out_baseline"):
            config.remove(f"grpo.{key}")
    config.follows([f"{section}.name"], f"{section}.name")
    config.follows([f"{section}.minus_baseline"], f"{section}: reinforce_plus_plus_baseline if true")


def _critic(config: Translation) -> None:
    section = "ppo.adv_estimator"
    own = config.get(f"{section}.gae_lambda_policy")
    config.put("ppo.gae_lambda", own if own is not None else config.get(f"{section}.gae_lambda", 0.95))
    returns = config.get(f"{section}.gae_lambda_value")
    if returns is not None:
        config.put("ppo.critic_gae_lambda", returns)
    alpha = config.get(f"{section}.length_adaptive_alpha")
    if alpha:
        config.put("ppo.length_adaptive_alpha", alpha)
    if config.get(f"{section}.name", "gae") != "gae":
        config.refuse(f"{section}.name", f"the advantage estimator {config.get(f'{section}.name')} in PPO")
    for name in ("name", "gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha"):
        rule = config.table.rule(f"{section}.{name}")
        config.follows([f"{section}.{name}"], rule.text if rule else "ppo.gae_lambda")
    scale = config.get("value_loss_fn.scale", 1.0)
    if scale not in (1, None) and config.written("value.optimizer.name") in (None, "torch.optim.AdamW"):
        # AdamW takes the same steps whatever the scale of the loss, but for the clip of the gradient and epsilon
        norm = config.get("value.max_grad_norm")
        if norm:
            config.put("value.max_grad_norm", norm / scale)
            config.follows(["value.max_grad_norm"], "value.max_grad_norm, divided by value_loss_fn.scale")
        config.follows(["value_loss_fn.scale"], "value.max_grad_norm, as AdamW takes steps of any scale alike")
    else:
        config.unneeded("value_loss_fn.scale", "1")


def _loss(config: Translation) -> None:
    penalty = config.get("loss_fn.reference_policy_kl_penalty")
    if not config.get("loss_fn.use_importance_sampling_correction"):
        for name in ("type", "ratio", "ratio_min"):
            config.unneeded(
                f"loss_fn.truncated_importance_sampling_{name}",
                "loss_fn.use_importance_sampling_correction is false",
            )
    if penalty == 0:
        for name in ("use_on_policy_kl_approximation", "use_kl_in_reward"):
            config.unneeded(f"loss_fn.{name}", "loss_fn.reference_policy_kl_penalty is 0")
    if config.get("loss_fn.force_on_policy_ratio") is False:
        config.unneeded("loss_fn.force_on_policy_ratio", "unset spares a pass if it gives the same, and else does not")
    if config.algorithm == "distillation" and config.has("loss_fn.zero_outside_topk"):
        if not config.get("loss_fn.zero_outside_topk"):
            config.notes.append(
                "loss_fn: here all tokens outside the teacher's top k count as one, the tail, in the divergence"
            )


def _environments(config: Translation) -> None:
    used = config.written("data.default.env_name")
    names = {used} if used else set()
    for purpose in ("train", "validation"):
        datasets = config.written(f"data.{purpose}")
        for each in datasets if isinstance(datasets, list) else [datasets]:
            if isinstance(each, dict) and each.get("env_name"):
                names.add(each["env_name"])
    for name in config.get("env") or {}:
        section = f"env.{name}"
        if name == "nemo_gym":
            config.refuse(section, "environments of NeMo Gym (env.nemo_gym)")
        elif name not in names:
            for key in config.keys(section):
                config.unneeded(key, "no dataset uses this environment")
    if config.algorithm not in _ROLLOUTS:
        for key in config.keys("env"):
            config.unneeded(key, f"{config.algorithm} scores nothing")
    verifier = config.get("env.math.math_verify_impl")
    if verifier == "dapo_math_verify":
        config.put("env.math.answer_format", "dapo")
        config.put("env.math.wrong_reward", -1.0)
        config.follows(["env.math.math_verify_impl"], "env.math.answer_format: dapo, env.math.wrong_reward: -1")
    elif verifier in (None, "hf_math_verify"):
        config.unneeded("env.math.math_verify_impl", "answers are compared by math-verify")
    if config.get("env.math.verifier_type") in ("multilingual_multichoice", "english_multichoice"):
        config.put("env.math.answer_format", "choice")
        config.follows(["env.math.verifier_type"], "env.math.answer_format: choice")
    config.unneeded("env.math.verifier_type", "answers are compared by math-verify")


def _validation(config: Translation) -> None:
    loop = config.algorithm
    has_data = config.written("data.validation") is not None or _holds_out(config)
    period = config.get(f"{loop}.val_period", 0)
    validates = has_data and (
        (period or 0) > 0 or config.get(f"{loop}.val_at_start") or config.get(f"{loop}.val_at_end")
    )
    if not has_data:
        for name in ("val_period", "val_at_start", "val_at_end", "val_batches", "val_global_batch_size"):
            config.unneeded(f"{loop}.{name}", "there is nothing to validate on")
            config.remove(f"{loop}.{name}")
        if loop in ("sft", "dpo", "rm"):
            config.put(f"{loop}.val_period", 0)
    name = config.get("checkpointing.metric_name")
    if name is None:
        return
    key = "checkpointing.metric_name"
    scope, _, metric = name.replace("/", ":").partition(":") if ":" in name or "/" in name else name.partition("_")
    if scope == "val" and not validates:
        config.unneeded(key, "this run does not validate; the newest checkpoints are kept")
        config.unneeded("checkpointing.higher_is_better", "no metric ranks checkpoints")
    elif scope == "val":
        here = _METRICS.get(metric) or ("val:loss" if metric.endswith("loss") else "val:accuracy")
        if loop in ("sft", "dpo", "rm") and here != "val:loss" and "accuracy" not in metric:
            here = "val:loss"
        config.put(key, here)
        config.answer(key, Kind.SAME if here == name else Kind.FOLLOWS, f"{key}: {here}")
    else:
        config.put(key, f"train:{metric}")
        config.answer(key, Kind.SAME if ":" in name else Kind.FOLLOWS, key)


def _holds_out(config: Translation) -> bool:
    datasets = config.written("data.train")
    several = datasets if isinstance(datasets, list) else [datasets]
    return any(isinstance(each, dict) and each.get("split_validation_size") for each in several)


def _trackers(config: Translation) -> None:
    for name, keys in (("wandb", ("project", "name")), ("mlflow", ("experiment_name", "run_name", "tracking_uri"))):
        if not config.get(f"logger.{name}_enabled"):
            for key in config.keys(f"logger.{name}"):
                config.unneeded(key, f"logger.{name}_enabled is false")
        for each in keys:
            if config.get(f"logger.{name}.{each}") is not None:
                config.rename(f"logger.{name}.{each}", f"logger.{name}.{each}")


def _cluster(config: Translation) -> None:
    config.put("cluster.device", "cuda")
