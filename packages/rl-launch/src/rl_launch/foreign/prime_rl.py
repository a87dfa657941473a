"""Configs of prime-rl: what is worked out from several keys. The others are in `tables/prime-rl.yaml`."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.schedules import warmup_and_decay
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_MASK_LOW, _MASK_HIGH = 0.125, 8.0
"""Importance ratios outside which prime-rl's loss leaves tokens out by default."""

_UNKNOWN_LENGTH = 1000
_ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
}
_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}


def algorithm_of(values: dict[str, Any]) -> str:
    """GRPO if there is an orchestrator, which rolls out, and SFT if there is data; else empty."""
    return "grpo" if "orchestrator" in values else "sft" if "data" in values else ""


def translate(config: Translation, gpus: int | None) -> None:
    """Answer the keys that need more than a table, then the others.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        gpus: Number of GPUs that train; None if only the file says it.
    """
    config.put("algorithm", config.algorithm)
    config.put("cluster.device", "cuda")
    _model(config)
    _optimizer(config)
    if config.algorithm == "grpo":
        _rollouts(config)
        _loss(config)
        _environments(config)
    else:
        _data(config)
    _devices(config, gpus)
    config.put("logger.wandb_enabled", config.has("wandb"))
    if not config.has("ckpt") and not config.has("trainer.ckpt"):
        config.put("checkpointing.save_period", 0)
    config.finish()


def _first(config: Translation, *keys: str, default: Any = None) -> Any:
    """The value of the first key that is given."""
    return next((value for key in keys if (value := config.get(key)) is not None), default)


def _model(config: Translation) -> None:
    sections = ("trainer.model", "model")
    if config.get("trainer.model.name"):
        config.rename("trainer.model.name", "policy.model_name")
    if config.get("model.name"):
        config.rename("model.name", "policy.model_name")
    for section in sections:
        if config.has(f"{section}.ac"):
            config.put("policy.dtensor_cfg.recompute", "full")
        for key in config.keys(f"{section}.ac"):
            config.follows([key], "policy.dtensor_cfg.recompute")
        attention = config.get(f"{section}.attn")
        if attention in _ATTENTION:
            config.put("policy.dtensor_cfg.attention_backend", _ATTENTION[attention])
        config.follows([f"{section}.attn"], "policy.dtensor_cfg.attention_backend")
        if config.has(f"{section}.lora"):
            config.put("policy.lora_cfg.enabled", True)
            for name, here in (("rank", "dim"), ("alpha", "alpha"), ("dropout", "dropout")):
                config.rename(f"{section}.lora.{name}", f"policy.lora_cfg.{here}")
            targets = config.get(f"{section}.lora.target_modules")
            if targets:
                config.put("policy.lora_cfg.match_all_linear", False)
                config.rename(f"{section}.lora.target_modules", "policy.lora_cfg.target_modules")


def _optimizer(config: Translation) -> None:
    section = "trainer.optim" if config.has("trainer.optim") else "optim"
    kind = str(config.get(f"{section}.type", "adamw"))
    if kind not in _OPTIMIZERS:
        config.refuse(f"{section}.type", f"the optimizer {kind}")
    rate = config.get(f"{section}.lr", 1e-6 if config.algorithm == "grpo" else 1e-5)
    arguments: dict[str, Any] = {"lr": rate, "weight_decay": config.get(f"{section}.weight_decay", 0.01)}
    if kind == "adamw":
        arguments["betas"] = [config.get(f"{section}.betas1", 0.9), config.get(f"{section}.betas2", 0.999)]
    config.put("policy.optimizer", {"name": _OPTIMIZERS.get(kind, "torch.optim.AdamW"), "kwargs": arguments})
    for name in ("type", "lr", "weight_decay", "betas1", "betas2"):
        config.follows([f"{section}.{name}"], "policy.optimizer")
    at = "trainer.scheduler" if config.has("trainer.scheduler") else "scheduler"
    style = config.get(f"{at}.type", "constant")
    if style not in ("constant", "linear", "cosine"):
        config.refuse(f"{at}.type", f"the learning-rate schedule {style}")
    steps = config.get("max_steps", _UNKNOWN_LENGTH)
    warmup = config.get(f"{at}.warmup_steps", 0 if style == "constant" else 10)
    least, decayed = config.get(f"{at}.min_lr", 0.0), config.get(f"{at}.decay_steps")
    if style == "linear" and decayed and warmup + decayed < steps:
        config.refuse(f"{at}.decay_steps", "a constant learning rate between warmup and decay")
    schedule = warmup_and_decay(rate, warmup=warmup, decay=style, end=steps, last=steps, end_rate=least)
    config.put("policy.scheduler", schedule)
    for name in ("type", "warmup_steps", "decay_steps", "min_lr"):
        config.follows([f"{at}.{name}"], "policy.scheduler")


def _rollouts(config: Translation) -> None:
    group = _first(config, "orchestrator.group_size", "orchestrator.rollouts_per_example", default=8)
    batch = config.get("orchestrator.batch_size", 128)
    if batch % group:
        config.refuse("orchestrator.batch_size", f"a batch of {batch} that is not a multiple of groups of {group}")
    config.put("grpo.num_generations_per_prompt", group)
    config.put("grpo.num_prompts_per_step", max(1, batch // group))
    config.put("policy.train_global_batch_size", batch)
    text = f"grpo.num_prompts_per_step: {batch // group} = {batch} rollouts / {group}"
    config.follows(["orchestrator.batch_size"], text)
    length = _first(config, "seq_len", "orchestrator.seq_len", "inference.model.max_model_len", default=2048)
    config.put("policy.max_total_sequence_length", length)
    sampling = [
        f"orchestrator.{part}sampling.max_{name}" for part in ("", "train.") for name in ("tokens", "completion_tokens")
    ]
    longest = _first(config, *sampling)
    config.put("policy.generation.max_new_tokens", min(longest or length - 1, length - 1))
    config.follows(sampling, "policy.generation.max_new_tokens")
    config.follows(
        ["seq_len", "orchestrator.seq_len", "inference.model.max_model_len"], "policy.max_total_sequence_length"
    )
    tokens = config.get("trainer.model.seq_len")
    if tokens:
        config.put("policy.sequence_packing.train_mb_tokens", max(tokens, length))
        config.follows(["trainer.model.seq_len"], "policy.sequence_packing.train_mb_tokens")
    ages = ("max_async_level", "async_level", "orchestrator.max_async_level", "orchestrator.async_level")
    age = _first(config, *ages, "orchestrator.max_off_policy_steps", default=1)
    if age:
        config.put(
            "grpo.async_grpo", {"enabled": True, "max_trajectory_age_steps": age, "in_flight_weight_updates": True}
        )
    config.follows([*ages, "orchestrator.max_off_policy_steps"], "grpo.async_grpo.max_trajectory_age_steps")
    config.put("data.overlong", "skip")


def _loss(config: Translation) -> None:
    """The loss of prime-rl: REINFORCE, weighted by the ratio of trainer and generator, without tokens whose ratio is
    out of bounds."""
    kind = config.get("trainer.loss.type", "default")
    if config.get("trainer.loss.ratio_type") == "sequence" or kind == "gspo":
        config.put("loss_fn.surrogate", {"name": "gspo"})
        config.put("loss_fn.aggregation", "sequence-mean")
    elif kind == "cispo":
        config.put("loss_fn.surrogate", {"name": "cispo"})
    elif kind == "default":
        config.put("loss_fn.surrogate", {"name": "reinforce"})
        config.put("loss_fn.importance", {"truncation": "icepop", "low": _MASK_LOW})
    else:
        config.refuse("trainer.loss.type", f"the loss {kind}")
    config.put("loss_fn.importance.high", _MASK_HIGH)
    config.put("loss_fn.kl.weight", 0.0)
    config.put("grpo.normalize_rewards", False)
    config.follows(["trainer.loss.type", "trainer.loss.ratio_type"], "loss_fn.surrogate")
    config.notes.append(
        f"loss_fn: prime-rl leaves out tokens whose ratio of trainer and generator is outside {_MASK_LOW} to "
        f"{_MASK_HIGH:g}, and compares rewards with the mean of their group; so do icepop and normalize_rewards=false"
    )


def _environments(config: Translation) -> None:
    for key in ("orchestrator.train.env", "orchestrator.env"):
        given = config.get(key)
        if given is None:
            continue
        named = [str(each.get("id") or each.get("name")) for each in given if isinstance(each, dict)]
        config.put("data.train", {"dataset_name": "OWNER/DATASET"})
        config.notes.append(
            f"data.train: its environment {', '.join(named)} is a package of verifiers, which brings its own prompts; "
            "set a dataset, and your own environment in env_name"
        )
        config.follows([key], "data.train.env_name")


def _data(config: Translation) -> None:
    source = config.get("data.source")
    names = [each.get("dataset") or each.get("name") for each in source or [] if isinstance(each, dict)]
    names = names or [_first(config, "data.name", "data.dataset")]
    made: list[dict[str, Any]] = [{"dataset_name": name} for name in names if name]
    if not made:
        made = [{"dataset_name": "OWNER/DATASET"}]
        config.notes.append("data.train.dataset_name: the file does not contain data. Set your own")
    for key, name in (("data.splits", "split"), ("data.subsets", "subset")):
        for each, value in zip(made, config.get(key) or [], strict=False):
            each[name] = value
        config.follows([key], f"data.train.{name}")
    config.put("data.train", made if len(made) > 1 else made[0])
    config.follows(["data.source", "data.name", "data.dataset"], "data.train")
    length = _first(config, "data.seq_len", "model.seq_len", "seq_len", default=128)
    config.put("policy.max_total_sequence_length", length)
    config.follows(["data.seq_len", "model.seq_len", "seq_len"], "policy.max_total_sequence_length")
    config.put("policy.sequence_packing.enabled", config.get("data.pack_function", "cat") != "stack")
    config.follows(["data.pack_function"], "policy.sequence_packing.enabled")
    config.put("sft.val_period", 0)
    config.put("data.overlong", "skip")
    if config.get("data.batch_size") is None:
        config.put("policy.train_global_batch_size", 128)


def _devices(config: Translation, gpus: int | None) -> None:
    trains = gpus or _first(config, "deployment.num_train_gpus") or len(config.get("trainer_gpu_ids", [])) or 1
    infers = _first(config, "deployment.num_infer_gpus") or len(config.get("inference_gpu_ids", [])) or 1
    nodes, others = config.get("deployment.num_train_nodes", 0), config.get("deployment.num_infer_nodes", 0)
    config.put("cluster.gpus_per_node", trains)
    if config.algorithm == "grpo":
        config.put("policy.generation.colocated.enabled", False)
        if nodes:
            config.put("cluster", {"device": "cuda", "num_nodes": nodes + max(1, others)})
            config.put("cluster.gpus_per_node", config.get("deployment.gpus_per_node", 8))
            config.put("policy.generation.colocated.resources.num_nodes", max(1, others))
        else:
            config.put("cluster.gpus_per_node", trains + infers)
            config.put("policy.generation.colocated.resources.gpus_per_node", infers)
    for key in [*config.keys("deployment"), "trainer_gpu_ids", "inference_gpu_ids"]:
        rule = config.table.rule(key)
        if rule is not None and rule.kind is Kind.FOLLOWS:
            config.follows([key], "cluster and policy.generation.colocated")
