"""Flags of OpenRLHF: what is worked out from several. The others are in `tables/openrlhf.yaml`."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.schedules import warmup_and_decay
from rl_launch.foreign.translation import Translation
from rl_launch.foreign.trl import with_defaults

_ESTIMATORS = {
    "rloo": {"name": "rloo"},
    "reinforce": {"name": "reinforce_plus_plus"},
    "reinforce_baseline": {"name": "reinforce_plus_plus_baseline"},
    "group_norm": {"name": "grpo"},
    "dr_grpo": {"name": "drgrpo"},
}
_DECAYS = {
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.1),
    "linear": ("linear", 0.0),
    "constant": ("constant", 0.0),
    "constant_with_warmup": ("constant", 0.0),
}
"""Decays by the names of transformers, with the share of the rate at the end, which OpenRLHF sets to a tenth."""

_UNKNOWN_LENGTH = 1000
_ROLLOUTS = ("ppo", "grpo")


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm by the flags; empty if they do not say it."""
    if "prompt_data" in values or "rollout_batch_size" in values or "advantage_estimator" in values:
        return "ppo" if values.get("advantage_estimator", "gae") == "gae" else "grpo"
    if "beta" in values or "ref_pretrain" in values or "ipo" in values:
        return "dpo"
    if "chosen_key" in values or values.get("loss") in ("sigmoid", "logexp"):
        return "rm"
    return "sft" if "dataset" in values else ""


def translate(config: Translation, gpus: int | None) -> None:
    """Answer the flags that need more than a table, then the others.

    Args:
        config: Translation that holds the flags and receives the answers.
        gpus: Number of GPUs of a node; None if only the flags say it.
    """
    with_defaults(config)
    config.put("algorithm", config.algorithm)
    config.put("cluster.device", "cuda")
    _devices(config, gpus)
    _optimizer(config)
    _adapters(config)
    _data(config)
    if config.algorithm in _ROLLOUTS:
        _rollouts(config)
    else:
        _supervised(config)
    _rest(config)
    config.finish()


def _devices(config: Translation, gpus: int | None) -> None:
    nodes = config.get("actor_num_nodes", config.get("num_nodes", 1))
    each = gpus or config.get("actor_num_gpus_per_node", 8)
    config.put("cluster.num_nodes", nodes)
    config.put("cluster.gpus_per_node", each)
    if config.algorithm in _ROLLOUTS and not config.get("colocate_all_models"):
        engines = config.get("vllm_num_engines", 1) * config.get("vllm_tensor_parallel_size", 1)
        config.put("policy.generation.colocated.enabled", False)
        if nodes == 1:
            config.put("policy.generation.colocated.resources.gpus_per_node", engines)
            config.put("cluster.gpus_per_node", each + engines)
        else:
            count = max(1, -(-engines // each))
            config.put("policy.generation.colocated.resources.num_nodes", count)
            config.put("cluster.num_nodes", nodes + count)
    keys = ("actor_num_nodes", "num_nodes", "actor_num_gpus_per_node", "vllm_num_engines", "colocate_all_models")
    config.follows([*keys, "colocate_actor_ref"], "cluster and policy.generation.colocated")


def _optimizer(config: Translation) -> None:
    sections = [("policy", "actor_learning_rate" if config.algorithm in _ROLLOUTS else "learning_rate")]
    if config.algorithm == "ppo":
        sections.append(("value", "critic_learning_rate"))
    style = config.get("lr_scheduler", "cosine_with_min_lr")
    for model, key in sections:
        rate = config.get(key)
        betas = config.get("adam_betas", [0.9, 0.95])
        kwargs = {"lr": rate, "weight_decay": config.get("l2", 0.0), "betas": betas}
        config.put(f"{model}.optimizer.kwargs", kwargs)
        config.follows([key], f"{model}.optimizer.kwargs.lr")
        if style not in _DECAYS:
            config.refuse("lr_scheduler", f"the learning-rate schedule {style}")
            continue
        decay, share = _DECAYS[style]
        warmup = round(config.get("lr_warmup_ratio", 0.03) * _UNKNOWN_LENGTH)
        schedule = warmup_and_decay(
            rate, warmup=warmup, decay=decay, end=_UNKNOWN_LENGTH, last=_UNKNOWN_LENGTH, end_rate=share * rate
        )
        config.put(f"{model}.scheduler", schedule)
        config.notes.append(
            f"{model}.scheduler: its {_UNKNOWN_LENGTH} steps are a guess. Set the number of steps of your data"
        )
    config.follows(["lr_scheduler", "lr_warmup_ratio"], "policy.scheduler")
    config.follows(["adam_betas", "l2"], "policy.optimizer.kwargs")
    config.put("policy.dtensor_cfg.cpu_offload", False)
    config.unneeded("adam_offload", "models free devices for each other automatically")
    config.unneeded("bf16", "policy.precision is bfloat16")


def _adapters(config: Translation) -> None:
    rank = config.get("lora_rank", 0)
    if rank:
        config.put("policy.lora_cfg.enabled", True)
        config.put("policy.lora_cfg.dim", rank)
        targets = config.get("target_modules", "all-linear")
        if targets != "all-linear":
            config.put("policy.lora_cfg.match_all_linear", False)
            config.put("policy.lora_cfg.target_modules", targets if isinstance(targets, list) else [targets])
    else:
        for key in ("lora_alpha", "lora_dropout"):
            config.unneeded(key, "no adapters are trained")
    config.follows(["lora_rank", "target_modules"], "policy.lora_cfg")


def _data(config: Translation) -> None:
    kind = "prompt_data" if config.algorithm in _ROLLOUTS else "dataset"
    split = config.get("prompt_split" if kind == "prompt_data" else "dataset_split")
    for key, purpose, part in ((kind, "train", split), ("eval_dataset", "validation", config.get("eval_split"))):
        named = config.get(key)
        names = str(named).split(",") if named else []
        made = [_dataset(name, part) for name in names]
        weights = config.get(f"{kind}_probs") if purpose == "train" else None
        if weights and len(made) > 1:
            for each, weight in zip(made, str(weights).split(","), strict=False):
                each["weight"] = float(weight)
        if made:
            config.put(f"data.{purpose}", made if len(made) > 1 else made[0])
        config.follows([key], f"data.{purpose}")
    if config.written("data.train") is None:
        config.put("data.train", {"dataset_name": "OWNER/DATASET"})
        config.notes.append("data.train.dataset_name: the flags do not contain data. Set your own")
    config.follows(["dataset_probs", "prompt_data_probs"], "data.train.weight")
    config.follows(["dataset_split", "prompt_split", "eval_split"], "data.train.split and data.validation.split")
    if config.get("max_samples"):
        config.notes.append(f"data.train.split: --max_samples {config.get('max_samples')} is written train[:N]")
    config.follows(["max_samples"], "data.train.split")
    if config.get("input_template"):
        config.refuse("input_template", "a template in a flag. Write it to a file, data.default.prompt_file")
    for key, name in (("chosen_key", "chosen"), ("rejected_key", "rejected"), ("prompt_key", "prompt")):
        if config.get(key):
            config.put(f"data.default.columns.{name}", config.get(key))
        config.follows([key], f"data.default.columns: {name}")
    config.put("data.overlong", "skip")
    config.notes.append("data.overlong: skip omits rows that are too long")


def _dataset(name: str, split: Any) -> dict[str, Any]:
    name = name.strip()
    if name.startswith(("/", "./", "~")) or name.endswith((".json", ".jsonl", ".parquet", ".csv")):
        return {"data_path": name}
    return {"dataset_name": name, **({"split": split} if split else {})}


def _rollouts(config: Translation) -> None:
    loop = config.algorithm
    estimator = config.get("advantage_estimator", "gae")
    if loop == "grpo":
        if estimator not in _ESTIMATORS:
            config.refuse("advantage_estimator", f"the advantage estimator {estimator}")
        else:
            config.put("grpo.adv_estimator", _ESTIMATORS[estimator])
        for key in ("critic_pretrain", "gamma", "lambd", "value_clip", "freezing_actor_steps", "critic_learning_rate"):
            config.unneeded(key, "there is no critic")
    else:
        model = config.get("critic_pretrain") or config.get("reward_pretrain") or config.get("pretrain")
        config.put("value.model_name", model)
        config.put("ppo.normalize_advantages", not config.get("no_advantage_std_norm", False))
        config.put("value.train_global_batch_size", config.get("train_batch_size"))
        config.put("value.train_micro_batch_size", config.get("micro_train_batch_size"))
    config.follows(["advantage_estimator", "no_advantage_std_norm"], "algorithm, and grpo.adv_estimator")
    prompt, response = config.get("prompt_max_len", 1024), config.get("generate_max_len", 1024)
    config.put("policy.max_total_sequence_length", prompt + response)
    if loop == "ppo":
        config.put("value.max_total_sequence_length", prompt + response)
    config.put("data.max_input_seq_length", prompt)
    config.follows(["prompt_max_len"], "data.max_input_seq_length")
    config.put(f"{loop}.num_prompts_per_step", config.get("rollout_batch_size"))
    config.put("policy.train_global_batch_size", config.get("train_batch_size"))
    config.follows(["rollout_batch_size"], f"{loop}.num_prompts_per_step")
    config.follows(["train_batch_size"], "policy.train_global_batch_size")
    key = "ppo.num_ppo_epochs" if loop == "ppo" else "grpo.num_iterations"
    if (passes := config.get("max_epochs", 1)) > 1:
        config.put(key, passes)
    config.follows(["max_epochs"], key)
    config.put(f"{loop}.max_num_steps", 1_000_000)
    _loss(config)
    _rewards(config)
    if config.get("async_train"):
        config.put(f"{loop}.async_grpo.enabled", True)
        config.put_default("loss_fn.importance.high", 2.0)
        config.notes.append("loss_fn.importance: a run that generates ahead needs one here")
    config.follows(["async_train"], f"{loop}.async_grpo.enabled")


def _loss(config: Translation) -> None:
    clip = config.get("eps_clip", 0.2)
    low, high = config.get("eps_clip_low_high", [clip, clip])
    config.put("loss_fn.surrogate", {"clip_low": low, "clip_high": high})
    clips = "loss_fn.surrogate.clip_low and loss_fn.surrogate.clip_high"
    config.follows(["eps_clip", "eps_clip_low_high"], clips)
    penalty = config.get("init_kl_coef", 0.01)
    config.put("loss_fn.kl.weight", penalty)
    config.put("loss_fn.kl.estimator", config.get("kl_estimator", "k1"))
    if penalty:
        config.put("loss_fn.kl.in_reward", not config.get("use_kl_loss", False))
    else:
        config.remove("loss_fn.kl.estimator")
    config.follows(["init_kl_coef", "kl_estimator", "use_kl_loss"], "loss_fn.kl.weight")
    if config.get("enable_vllm_is_correction"):
        bound = config.get("vllm_is_truncated_threshold", 5)
        if isinstance(bound, list):
            config.put("loss_fn.importance.low", bound[0])
            bound = bound[-1]
        config.put("loss_fn.importance.high", bound)
    config.follows(["enable_vllm_is_correction", "vllm_is_truncated_threshold"], "loss_fn.importance")


def _rewards(config: Translation) -> None:
    remote, model = config.get("remote_rm_url"), config.get("reward_pretrain")
    if isinstance(remote, str) and remote.endswith(".py"):
        config.notes.append(
            f"data.default.env_name: name what scores responses, in place of {remote}: FILE.py:NAME "
            "(docs/rewards-and-environments.md has its parameters)"
        )
    elif remote:
        config.refuse(
            "remote_rm_url", "a reward server by its address. Call it from a function, env_name: FILE.py:NAME"
        )
    elif model:
        config.put("data.default.env_name", "reward_model")
        config.put("env.reward_model.model", model)
    elif config.get("agent_func_path"):
        config.refuse("agent_func_path", "an OpenRLHF agent. Write it as an environment, env_name: FILE.py:NAME")
    else:
        config.notes.append(
            "data.default.env_name: the flags do not contain a reward. Set the function or environment that scores "
            "responses"
        )
    config.follows(["remote_rm_url", "reward_pretrain", "agent_func_path"], "data.default.env_name")


def _supervised(config: Translation) -> None:
    loop = config.algorithm
    batch = config.get("train_batch_size")
    config.put("policy.train_global_batch_size", batch)
    config.follows(["train_batch_size"], "policy.train_global_batch_size")
    if loop in ("dpo", "rm"):
        config.put("policy.train_micro_batch_size", 2 * config.get("micro_train_batch_size"))
        config.follows(["micro_train_batch_size"], "policy.train_micro_batch_size, counted in rows, two for a pair")
    if loop == "dpo":
        config.put("dpo.reference_policy_kl_penalty", config.get("beta", 0.1))
        config.follows(["beta"], "dpo.reference_policy_kl_penalty")
        smoothing = config.get("label_smoothing", 0.0)
        if config.get("ipo"):
            config.put("dpo.loss", {"name": "ipo"})
        elif smoothing:
            config.put("dpo.loss", {"name": "dpo", "label_smoothing": smoothing})
        config.follows(["ipo", "label_smoothing"], "dpo.loss")
        reference = config.get("ref_pretrain")
        if reference not in (None, config.get("pretrain")):
            config.refuse("ref_pretrain", "a reference model other than the initial policy")
        config.unneeded("ref_pretrain", "the reference is the initial policy")
    if loop == "rm":
        if config.get("loss", "sigmoid") != "sigmoid":
            config.refuse("loss", f"the reward model's loss {config.get('loss')}")
        config.follows(["loss"], "rm.loss: bradley-terry")
    if loop == "sft" and config.get("pretrain_mode"):
        config.refuse("pretrain_mode", "training on whole texts (pretrain_mode)")
    if not config.get("packing_samples"):
        config.put("policy.sequence_packing.enabled", False)


def _rest(config: Translation) -> None:
    loop = config.algorithm
    period = config.get("eval_steps", -1)
    if config.written("data.validation") is None:
        if loop not in _ROLLOUTS:
            config.put(f"{loop}.val_period", 0)
    else:
        config.put(f"{loop}.val_period", max(0, period))
    config.follows(["eval_steps"], f"{loop}.val_period")
    if config.get("save_steps", -1) < 0:
        config.put("checkpointing.save_period", 0)
        config.follows(["save_steps"], "checkpointing.save_period: 0, which saves at the end only")
    config.put("logger.wandb_enabled", bool(config.get("use_wandb")))
    config.follows(["use_wandb"], "logger.wandb_enabled; the key belongs in WANDB_API_KEY")
    config.unneeded("save_hf_ckpt", "every checkpoint has Hugging Face files in hf/")
    config.unneeded("ref_pretrain", "the reference is the initial policy")
