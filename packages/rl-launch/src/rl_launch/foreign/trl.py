"""Configs of TRL: what is worked out from several fields. The others are in `tables/trl.yaml`."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.schedules import warmup_and_decay
from rl_launch.foreign.surrogate import put_surrogate
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_OF_GRPO = ("num_generations", "max_completion_length", "reward_funcs", "scale_rewards", "epsilon", "num_iterations")
_OF_DPO = ("precompute_ref_log_probs", "rpo_alpha", "max_prompt_length", "label_smoothing", "reference_free")
_OF_REWARDS = ("center_rewards_coefficient",)
_OF_SFT = ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length")
_BY_FIELD = {"grpo": _OF_GRPO, "rm": _OF_REWARDS, "sft": _OF_SFT, "dpo": _OF_DPO}

_OPTIMIZERS = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_hf": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "sequence-mean",
    "dr_grpo": "sequence-mean-token-sum",
    "cispo": "token-mean",
    "sapo": "sequence-mean",
}
_SURROGATES = {"cispo": "cispo", "sapo": "sapo"}
_PREFERENCE_LOSSES = {
    "sigmoid": "dpo",
    "robust": "robust-dpo",
    "ipo": "ipo",
    "hinge": "hinge",
    "simpo": "simpo",
    "orpo": "orpo",
    "kto": "kto",
}
_KTO_WEIGHTS = ("desirable_weight", "undesirable_weight")
_TRACKERS = ("wandb", "mlflow", "tensorboard")
_FILES = (".csv", ".json", ".jsonl", ".parquet")
_UNKNOWN_LENGTH = 1000
"""Steps of a decay if neither the file nor the data say how many steps there are."""


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm by fields that only one trainer has; empty if there are none."""
    return next((name for name, fields in _BY_FIELD.items() if any(field in values for field in fields)), "")


def translate(config: Translation, gpus: int | None) -> None:
    """Answer the fields that need more than a table, then the others.

    Args:
        config: Translation that holds the fields and receives the answers.
        gpus: Number of GPUs; None if it is not known.
    """
    if _weighs_responses(config):
        config.values.setdefault("loss_type", "kto")
    with_defaults(config)
    config.put("algorithm", config.algorithm)
    config.put("cluster", {"device": "cuda", "gpus_per_node": gpus or 1})
    if gpus is None:
        config.notes.append(
            "cluster.gpus_per_node: 1, because the file does not contain it. Import with --gpus N for other values"
        )
    _model(config)
    _optimizer(config)
    _batches(config, gpus or 1)
    _data(config)
    _schedule(config)
    {"grpo": _grpo, "dpo": _dpo, "sft": _sft, "rm": _rewards}[config.algorithm](config)
    _saving(config)
    _pushing(config)
    config.finish()


def _weighs_responses(config: Translation) -> bool:
    """Return whether the file is of a KTOTrainer, which has a loss of its own."""
    return any(key in config.values for key in _KTO_WEIGHTS)


def with_defaults(config: Translation) -> None:
    """Fill in the defaults of TRL's trainer that matter and are not those here."""
    known = config.table.defaults.get(config.algorithm, {})
    missing = {key: value for key, value in known.items() if key not in config.values}
    config.values.update(missing)
    for key, value in missing.items():
        rule = config.table.rule(key)
        if rule is not None and rule.kind is Kind.RENAMED:
            config.put(rule.answer(key, config.algorithm), value)
    if missing:
        listed = ", ".join(f"{key}={value}" for key, value in missing.items())
        config.notes.append(f"defaults of {config.table.name} that the file leaves out, and that were taken: {listed}")


def _model(config: Translation) -> None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    half = config.get("fp16") or dtype == "float16"
    if half:
        config.refuse("fp16" if config.get("fp16") else "dtype", "float16 training")
    full = dtype == "float32" and not config.get("bf16")
    config.put("policy.precision", "float32" if full else "bfloat16")
    config.follows(["bf16", "fp16", "dtype", "torch_dtype"], "policy.precision")
    attention = config.get("attn_implementation")
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        config.put("policy.dtensor_cfg.attention_backend", attention)
    config.follows(["attn_implementation"], "policy.dtensor_cfg.attention_backend; kernels from the hub are not loaded")
    targets = config.get("lora_target_modules")
    if config.get("use_peft"):
        config.put("policy.lora_cfg", {"enabled": True, "dim": 16, "alpha": 32, "dropout": 0.05})
    if config.get("use_peft") and targets and targets not in ("all-linear", ["all-linear"]):
        config.put("policy.lora_cfg.match_all_linear", False)
        config.put("policy.lora_cfg.target_modules", targets if isinstance(targets, list) else [targets])
    config.follows(["lora_target_modules"], "policy.lora_cfg.target_modules")
    kwargs = config.get("chat_template_kwargs")
    if kwargs:
        config.put("policy.tokenizer.chat_template_kwargs", kwargs)
    for key in config.keys("chat_template_kwargs"):
        config.answer(key, Kind.RENAMED, "policy.tokenizer.chat_template_kwargs")
    text = config.get("chat_template")
    if text:
        config.rename("chat_template", "policy.tokenizer.chat_template")


def _optimizer(config: Translation) -> None:
    name = str(config.get("optim", "adamw_torch"))
    kind = _OPTIMIZERS.get(name)
    if kind is None:
        config.refuse("optim", f"the optimizer {name}")
        kind = "torch.optim.AdamW"
    arguments: dict[str, Any] = {
        "lr": config.get("learning_rate"),
        "weight_decay": config.get("weight_decay", 0.0),
    }
    if kind == "torch.optim.AdamW":
        arguments["betas"] = [config.get("adam_beta1", 0.9), config.get("adam_beta2", 0.999)]
        arguments["eps"] = config.get("adam_epsilon", 1e-8)
    config.put("policy.optimizer", {"name": kind, "kwargs": arguments})
    keys = ("optim", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    config.follows(keys, "policy.optimizer")


def _batches(config: Translation, gpus: int) -> None:
    each = config.get("per_device_train_batch_size", 8)
    accumulated = config.get("gradient_accumulation_steps", 1)
    batch = each * accumulated * gpus
    pairs = 2 if config.algorithm in ("dpo", "rm") else 1
    config.put("policy.train_global_batch_size", batch)
    config.put("policy.train_micro_batch_size", each * pairs)
    config.put("policy.logprob_batch_size", config.get("per_device_eval_batch_size", each) * pairs)
    text = f"policy.train_global_batch_size: {batch} = {each} x {accumulated} x {gpus} GPUs"
    config.follows(["per_device_train_batch_size", "gradient_accumulation_steps"], text)
    config.follows(["per_device_eval_batch_size"], "policy.logprob_batch_size")
    if config.algorithm != "grpo":
        return
    group = config.get("num_generations", 8)
    per_step = config.get("steps_per_generation", accumulated)
    completions = config.get("generation_batch_size", each * gpus * per_step)
    if completions % group:
        config.refuse(
            "num_generations", f"groups of {group} that do not divide the {completions} completions of a step"
        )
        return
    config.put("grpo.num_prompts_per_step", completions // group)
    config.follows(
        ["steps_per_generation", "generation_batch_size"],
        f"grpo.num_prompts_per_step: {completions // group} = {completions} completions / {group}",
    )
    if completions < batch:
        config.put("policy.train_global_batch_size", completions)
        config.notes.append(
            f"policy.train_global_batch_size: {completions}, the completions of a generation; TRL accumulates over "
            f"{batch // completions} generations, so raise grpo.num_prompts_per_step to take larger steps"
        )


def _data(config: Translation) -> None:
    name = config.get("dataset_name")
    datasets = config.get("datasets")
    if name is None and datasets is None:
        config.notes.append("data.train.dataset_name: the dataset is in the script. Set it in the recipe")
        name = "OWNER/DATASET"
    if datasets is not None:
        for key in config.keys("datasets"):
            config.refuse(key, "a mixture in `datasets`. List the datasets in data.train")
    if name is None:
        return
    local = any(str(name).startswith(each) for each in ("/", "./", "~")) or str(name).endswith(_FILES)
    config.put(f"data.train.{'data_path' if local else 'dataset_name'}", name)
    subset, split = config.get("dataset_config"), config.get("dataset_train_split")
    if split and not local:
        config.put("data.train.split", split)
    wants = config.get("eval_strategy", config.get("evaluation_strategy", "no"))
    if wants != "no":
        test = config.get("dataset_test_split", "test")
        validation = {"data_path" if local else "dataset_name": name, **({} if local else {"split": test})}
        config.put("data.validation", {**validation, **({"subset": subset} if subset else {})})
        if wants == "epoch":
            config.put(f"{config.algorithm}.val_at_end", True)
        steps = config.get("eval_steps", 500)
        config.put(f"{config.algorithm}.val_period", 0 if wants == "epoch" else _whole(steps))
    elif config.algorithm != "grpo":
        config.put(f"{config.algorithm}.val_period", 0)
    keys = ("dataset_name", "dataset_train_split", "dataset_test_split")
    config.follows(keys, "data")
    config.follows(("eval_strategy", "evaluation_strategy", "eval_steps"), f"{config.algorithm}.val_period")
    prompt = config.get("system_prompt")
    if prompt:
        config.refuse(
            "system_prompt", "a system prompt in the config: write it to a file, data.default.system_prompt_file"
        )


def _whole(steps: Any) -> int:
    return int(steps) if isinstance(steps, int) or float(steps) >= 1 else 1


def _schedule(config: Translation) -> None:
    style = config.get("lr_scheduler_type", "linear")
    steps = config.get("max_steps", -1)
    if steps > 0:
        config.put(f"{config.algorithm}.max_num_steps", steps)
        config.put(f"{config.algorithm}.max_num_epochs", None)
        config.unneeded("num_train_epochs", "max_steps decides")
    config.follows(["max_steps"], f"{config.algorithm}.max_num_steps")
    decay = _DECAYS.get(style)
    least = 0.0
    given = config.get("lr_scheduler_kwargs") or {}
    if style == "cosine_with_min_lr":
        decay = "cosine"
        least = given.get("min_lr", given.get("min_lr_rate", 0.0) * config.get("learning_rate", 0.0))
    if decay is None:
        config.refuse("lr_scheduler_type", f"the learning-rate schedule {style}")
        return
    length = steps if steps > 0 else _UNKNOWN_LENGTH
    warmup = config.get("warmup_steps", 0)
    if not warmup and config.get("warmup_ratio"):
        warmup = max(1, round(config.get("warmup_ratio") * length))
    if steps <= 0 and (decay != "constant" or config.get("warmup_ratio")):
        config.notes.append(
            f"policy.scheduler: its {length} steps are a guess, because the file counts epochs. "
            "Set the number of steps of your data"
        )
    rate = config.get("learning_rate")
    updates = 1
    if config.algorithm == "grpo":
        rows = config.written("grpo.num_prompts_per_step") or 1
        completions = rows * config.get("num_generations", 8)
        updates = max(1, completions // (config.written("policy.train_global_batch_size") or completions))
        updates *= config.get("num_iterations", 1)
        if steps > 0 and updates > 1:
            config.put("grpo.max_num_steps", max(1, steps // updates))
            config.notes.append(f"grpo.max_num_steps: {steps} optimizer steps are {steps // updates} steps here")
    schedule = warmup_and_decay(rate, warmup=int(warmup), decay=decay, end=length, last=length, end_rate=least)
    config.put("policy.scheduler", schedule)
    for name in ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"):
        for key in config.keys(name):
            config.follows([key], "policy.scheduler")


def _grpo(config: Translation) -> None:
    longest = config.get("max_completion_length", 256)
    prompt = config.get("max_prompt_length", 512)
    config.put("policy.max_total_sequence_length", longest + prompt)
    config.put("policy.generation.max_new_tokens", longest)
    config.put("data.max_input_seq_length", prompt)
    config.put("data.overlong", "skip")
    config.put("loss_fn.kl.weight", config.get("beta", 0.0))
    config.follows(["beta"], "loss_fn.kl.weight")
    _loss(config, longest)
    scale = config.get("scale_rewards", "group")
    if scale == "batch":
        config.put("grpo.adv_estimator", {"name": "grpo_batch_std"})
    else:
        config.put("grpo.normalize_rewards", scale in (True, "group"))
    config.follows(["scale_rewards"], "grpo.normalize_rewards")
    if config.get("sync_ref_model"):
        config.put("grpo.reference_sync_period", config.get("ref_model_sync_steps", 512))
        config.put("grpo.reference_mixup_alpha", config.get("ref_model_mixup_alpha", 0.6))
    config.follows(["sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"], "grpo.reference_sync_period")
    top_k = config.get("top_k", 0)
    if top_k and top_k > 0:
        config.put("policy.generation.top_k", top_k)
    config.follows(["top_k"], "policy.generation.top_k; 0 and -1 sample from all tokens")
    if config.get("vllm_mode") == "server":
        config.put("policy.generation.colocated.enabled", False)
        config.put("policy.generation.colocated.resources.gpus_per_node", 1)
        config.put("cluster.gpus_per_node", config.written("cluster.gpus_per_node") + 1)
        config.notes.append(
            "policy.generation.colocated.resources: one GPU generates; give it as many as your server has"
        )
    config.follows(["vllm_mode"], "policy.generation.colocated.enabled")
    if config.get("top_entropy_quantile") == 1:
        config.unneeded("top_entropy_quantile", "1 trains on all tokens")
    rewards = config.get("reward_funcs")
    named = f" ({', '.join(map(str, rewards if isinstance(rewards, list) else [rewards]))})" if rewards else ""
    config.notes.append(
        f"data.train.env_name: write your reward functions{named} into a file, and name it: FILE.py:NAME for one, or "
        "env.NAME.rewards and reward_weights for several"
    )
    config.follows(["reward_funcs", "reward_weights"], "data.train.env_name, which the recipe leaves to you")


def _loss(config: Translation, longest: int) -> None:
    kind, surrogate = config.get("loss_type", "dapo"), "clip"
    if config.get("importance_sampling_level", "token") == "sequence":
        surrogate = "gspo"
        config.put("loss_fn.aggregation", "sequence-mean")
        if kind not in ("grpo", "dapo", "bnpo"):
            config.refuse("loss_type", f"importance sampling by sequence with the loss {kind}")
        elif kind != "grpo":
            config.notes.append("loss_fn.aggregation: sequence-mean, as gspo has it here")
    elif kind in _AGGREGATIONS:
        surrogate, aggregation = _SURROGATES.get(kind, "clip"), _AGGREGATIONS[kind]
        divided = {"name": aggregation, "divisor": longest}
        config.put("loss_fn.aggregation", divided if kind == "dr_grpo" else aggregation)
    else:
        config.refuse("loss_type", f"the loss {kind} in GRPO")
    config.follows(["loss_type", "importance_sampling_level"], "loss_fn.aggregation and loss_fn.surrogate")
    clip = config.get("epsilon", 0.2)
    put_surrogate(
        config,
        surrogate,
        {"epsilon": "clip_low", "epsilon_high": "clip_high", "delta": "dual_clip"},
        clip_low=clip,
        clip_high=config.get("epsilon_high", clip),
        dual_clip=config.get("delta"),
    )
    correction = "vllm_importance_sampling_correction"
    if config.get(correction):
        config.put("loss_fn.importance", {})
    else:
        config.unneeded("vllm_importance_sampling_cap", f"{correction} is not set")
    config.follows([correction], "loss_fn.importance")


def _dpo(config: Translation) -> None:
    kind = config.get("loss_type", "sigmoid")
    kinds = kind if isinstance(kind, list) else [kind]
    if len(kinds) > 1 or kinds[0] not in _PREFERENCE_LOSSES:
        config.refuse("loss_type", f"the preference loss {' + '.join(map(str, kinds))}")
    else:
        smoothing = config.get("label_smoothing", 0.0)
        loss: dict[str, Any] = {"name": _PREFERENCE_LOSSES[kinds[0]]}
        if smoothing:
            loss["label_smoothing"] = smoothing
        config.put("dpo.loss", loss)
        if kinds[0] == "ipo":
            config.put("dpo.preference_average_log_probs", True)
    for key in _KTO_WEIGHTS:
        if config.get(key, 1.0) == 1.0:
            config.unneeded(key, "responses count alike")
        else:
            config.refuse(key, "weights of desirable and undesirable responses in KTO")
    config.put("dpo.reference_policy_kl_penalty", config.get("beta", 0.1))
    config.follows(["beta"], "dpo.reference_policy_kl_penalty")
    config.follows(["loss_type", "label_smoothing"], "dpo.loss")
    config.unneeded("max_prompt_length", "a prompt may fill policy.max_total_sequence_length; longer rows are left out")
    config.unneeded("max_completion_length", "a response may fill policy.max_total_sequence_length")
    config.put("data.overlong", "skip")


def _sft(config: Translation) -> None:
    config.put("policy.sequence_packing.enabled", bool(config.get("packing")))
    config.follows(["packing"], "policy.sequence_packing.enabled, in which rows do not attend to each other")
    for key in ("assistant_only_loss", "completion_only_loss"):
        if config.get(key) is False:
            config.refuse(key, "learning the prompt too (assistant_only_loss, completion_only_loss: false)")
        config.follows([key], "sft.learn; only the assistant's text is trained")
    if config.get("assistant_only_loss") is None and config.get("completion_only_loss") is None:
        config.notes.append(
            "sft.learn: only the assistant's text is trained; TRL learns whole conversations unless told otherwise"
        )
    config.put("data.overlong", "skip")
    config.notes.append("data.overlong: skip leaves out rows that TRL cuts at max_length")


def _rewards(config: Translation) -> None:
    config.put("data.overlong", "skip")


def _saving(config: Translation) -> None:
    strategy = config.get("save_strategy", "steps")
    steps = config.get("save_steps", 500)
    if strategy == "no":
        config.put("checkpointing.save_period", 0)
    elif strategy == "epoch":
        config.put("checkpointing.save_period", 0)
        config.notes.append("checkpointing.save_period: 0 saves at the end, as the steps of an epoch are not known")
    else:
        config.put("checkpointing.save_period", _whole(steps))
    config.follows(["save_strategy", "save_steps"], "checkpointing.save_period")
    best = config.get("metric_for_best_model")
    if config.get("load_best_model_at_end") or best:
        config.put("checkpointing.metric_name", "val:reward" if config.algorithm == "grpo" else "val:loss")
        if config.algorithm != "grpo":
            config.put("checkpointing.higher_is_better", False)
    config.follows(["load_best_model_at_end", "metric_for_best_model"], "checkpointing.metric_name")
    reported = config.get("report_to", [])
    several = [] if reported in ("none", "all") else reported if isinstance(reported, list) else [reported]
    for tracker in _TRACKERS:
        config.put(f"logger.{tracker}_enabled", tracker in several)
    other = [each for each in several if each not in (*_TRACKERS, "none")]
    config.follows(["report_to"], f"logger.*_enabled{f'; {other} is not offered' if other else ''}")
    project = config.get("wandb_project")
    if project:
        config.rename("wandb_project", "logger.wandb.project")


def _pushing(config: Translation) -> None:
    name = config.get("hub_model_id", config.get("push_to_hub_model_id"))
    if config.get("push_to_hub") and "/" in str(name):
        config.put("checkpointing.push_to", f"hf://{name}")
        if config.get("hub_strategy", "every_save") != "end":
            config.put("checkpointing.push_checkpoints", "every")
        if config.get("hub_private_repo") is False:
            config.put("checkpointing.push_private", False)
    elif config.get("push_to_hub"):
        config.notes.append("checkpointing.push_to: put hf://OWNER/NAME, as the file does not name the owner")
    config.follows(["push_to_hub", "hub_model_id", "push_to_hub_model_id"], "checkpointing.push_to")
    config.follows(["hub_strategy"], "checkpointing.push_checkpoints")
    config.follows(["hub_private_repo"], "checkpointing.push_private")
