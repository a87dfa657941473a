"""Configs of verl: what is worked out from several keys. The others are in `tables/verl.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_launch.foreign.schedules import count_rows, warmup_and_decay
from rl_launch.foreign.surrogate import put_surrogate
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_ESTIMATORS = {
    "grpo": None,
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
}
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "sequence-mean-token-sum",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_SURROGATES = {
    "vanilla": "clip",
    "gpg": "reinforce",
    "gspo": "gspo",
    "clip_cov": "clip-cov",
    "kl_cov": "kl-cov",
    "gmpo": "gmpo",
    "geo_mean": "gmpo",
}
_CLIPS = {
    "clip_ratio": "clip_low",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
}
_DECAYS = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
_UNKNOWN_LENGTH = 1000

BASES: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
}
"""What verl's own configs set that a file which inherits from them relies on, beyond the defaults taken below."""


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm by the advantage estimator; verl's default is GAE."""
    if "actor_rollout_ref" not in values:
        return ""
    estimator = (values.get("algorithm") or {}).get("adv_estimator", "gae")
    return "ppo" if estimator == "gae" else "grpo"


def translate(config: Translation, folder: Path) -> None:
    """Answer the keys that need more than a table, then the others.

    Args:
        config: Translation that holds the keys and receives the answers.
        folder: Folder of the file, which relative paths of data start from.
    """
    config.put("algorithm", config.algorithm)
    config.put("cluster", {"device": "cuda", "num_nodes": 1, "gpus_per_node": 8})
    _estimator(config)
    _lengths(config)
    _batches(config)
    _data(config)
    steps, counted = _steps(config, folder)
    for model, section in (("policy", _ACTOR), ("value", "critic")):
        if model == "policy" or config.algorithm == "ppo":
            _optimizer(config, model, section, steps)
            config.notes += (
                [f"{model}.scheduler: {counted}"] if counted and config.written(f"{model}.scheduler") else []
            )
    if config.algorithm != "ppo":
        for section in ("critic", "algorithm.lam", "algorithm.gamma", "trainer.critic_warmup"):
            for key in config.keys(section):
                config.unneeded(key, "there is no critic")
    _model(config)
    _loss(config)
    _generation(config)
    _trainer(config)
    config.finish()


def _estimator(config: Translation) -> None:
    name = config.get("algorithm.adv_estimator", "gae")
    if config.algorithm == "grpo":
        if name not in _ESTIMATORS:
            config.refuse("algorithm.adv_estimator", f"the advantage estimator {name}")
        elif _ESTIMATORS[name]:
            config.put("grpo.adv_estimator", {"name": _ESTIMATORS[name]})
    config.follows(["algorithm.adv_estimator"], "algorithm, and grpo.adv_estimator")
    if config.algorithm == "ppo":
        config.put("ppo.gae_lambda", config.get("algorithm.lam", 1.0))
        config.put("ppo.value_clip", config.get("critic.cliprange_value", 0.5))
        config.put("ppo.num_generations_per_prompt", config.get(f"{_ROLLOUT}.n", 1))
        config.follows([f"{_ROLLOUT}.n"], "ppo.num_generations_per_prompt")
        config.unneeded("algorithm.norm_adv_by_std_in_grpo", "advantages are GAE advantages")


def _lengths(config: Translation) -> None:
    prompt, response = config.get("data.max_prompt_length", 512), config.get("data.max_response_length", 512)
    config.put("policy.max_total_sequence_length", prompt + response)
    config.put("policy.generation.max_new_tokens", response)
    config.put("data.max_input_seq_length", prompt)
    if config.algorithm == "ppo":
        config.put("value.max_total_sequence_length", prompt + response)
    room = config.get(f"{_ROLLOUT}.max_model_len")
    if room:
        config.put("policy.generation.vllm_cfg.max_model_len", max(room, response + 1))
    config.follows([f"{_ROLLOUT}.max_model_len"], "policy.max_total_sequence_length")
    skips = config.get("data.filter_overlong_prompts") or config.get("data.truncation", "error") != "error"
    config.put("data.overlong", "skip" if skips else "error")
    config.follows(["data.filter_overlong_prompts", "data.truncation"], "data.overlong; prompts are never truncated")


def _batches(config: Translation) -> None:
    group = config.get(f"{_ROLLOUT}.n", 1)
    prompts = config.get("data.train_batch_size", 1024)
    config.put(f"{config.algorithm}.num_prompts_per_step", prompts)
    config.put_default(f"{config.algorithm}.num_generations_per_prompt", group)
    sections = [("policy", _ACTOR)] + ([("value", "critic")] if config.algorithm == "ppo" else [])
    for model, section in sections:
        count = config.get(f"{section}.ppo_mini_batch_size", config.get(f"{_ACTOR}.ppo_mini_batch_size", 256))
        config.put(f"{model}.train_global_batch_size", count * group)
        config.follows(
            [f"{section}.ppo_mini_batch_size"],
            f"{model}.train_global_batch_size: {count * group}, counted in rollouts, {group} for a prompt",
        )
        each = config.get(f"{section}.ppo_micro_batch_size_per_gpu", config.get(f"{section}.ppo_micro_batch_size"))
        if each:
            config.put(f"{model}.train_micro_batch_size", each)
        for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
            config.follows([f"{section}.{name}"], f"{model}.train_micro_batch_size")
        packs = bool(config.get(f"{section}.use_dynamic_bsz"))
        config.put(f"{model}.sequence_packing.enabled", packs)
        tokens = config.get(f"{section}.ppo_max_token_len_per_gpu")
        if packs and tokens:
            config.put(f"{model}.sequence_packing.train_mb_tokens", tokens)
        config.follows(
            [f"{section}.use_dynamic_bsz", f"{section}.ppo_max_token_len_per_gpu"], f"{model}.sequence_packing"
        )
    passes = config.get(f"{_ACTOR}.ppo_epochs", 1)
    if config.algorithm == "ppo":
        config.put("ppo.num_ppo_epochs", passes)
        if config.get("critic.ppo_epochs", passes) != passes:
            config.refuse("critic.ppo_epochs", "other passes of the critic over a step than of the policy")
    elif passes > 1:
        config.put("grpo.num_iterations", passes)
    key = "ppo.num_ppo_epochs" if config.algorithm == "ppo" else "grpo.num_iterations"
    config.follows([f"{_ACTOR}.ppo_epochs", "critic.ppo_epochs"], key)
    rows = config.get(
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", config.get(f"{_ROLLOUT}.log_prob_micro_batch_size")
    )
    if rows:
        config.put("policy.logprob_batch_size", rows)
    tokens = config.get(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")
    if tokens and config.get(f"{_ACTOR}.use_dynamic_bsz"):
        config.put("policy.sequence_packing.logprob_mb_tokens", tokens)
    for name in ("forward_micro_batch_size_per_gpu", "forward_micro_batch_size"):
        if config.algorithm == "ppo" and config.get(f"critic.{name}"):
            config.put("value.logprob_batch_size", config.get(f"critic.{name}"))


def _steps(config: Translation, folder: Path) -> tuple[int, str]:
    """The steps of the run, and where they come from if the file does not contain them."""
    if steps := config.get("trainer.total_training_steps"):
        return steps, ""
    rows = count_rows(config.written("data.train"), folder)
    prompts = config.get("data.train_batch_size", 1024)
    if rows is None or rows < prompts:
        return _UNKNOWN_LENGTH, f"its {_UNKNOWN_LENGTH} steps are a guess. Set the number of steps of your data"
    steps = rows // prompts * config.get("trainer.total_epochs", 30)
    return steps, f"{steps} steps, counted from the rows of the data"


def _optimizer(config: Translation, model: str, section: str, steps: int) -> None:
    at = f"{section}.optim"
    rate = config.get(f"{at}.lr", 1e-6 if model == "policy" else 1e-5)
    config.put(
        f"{model}.optimizer.kwargs",
        {
            "lr": rate,
            "weight_decay": config.get(f"{at}.weight_decay", 0.01),
            "betas": config.get(f"{at}.betas", [0.9, 0.999]),
        },
    )
    style = config.get(f"{at}.lr_scheduler_type", config.get(f"{at}.warmup_style", "constant"))
    warmup = config.get(f"{at}.lr_warmup_steps", -1)
    if warmup < 0:
        warmup = round(config.get(f"{at}.lr_warmup_steps_ratio", 0.0) * steps)
    if style not in _DECAYS:
        config.refuse(f"{at}.warmup_style", f"the learning-rate schedule {style}")
    else:
        least = rate * config.get(f"{at}.min_lr_ratio", 0.0)
        schedule = warmup_and_decay(rate, warmup=warmup, decay=_DECAYS[style], end=steps, last=steps, end_rate=least)
        config.put(f"{model}.scheduler", schedule)
    for name in ("lr", "weight_decay", "betas"):
        config.follows([f"{at}.{name}"], f"{model}.optimizer.kwargs")
    for name in (
        "lr_warmup_steps", "lr_warmup_steps_ratio", "warmup_style", "lr_scheduler_type", "min_lr_ratio",
        "total_training_steps", "num_cycles",
    ):  # fmt: skip
        config.follows([f"{at}.{name}"], f"{model}.scheduler")


def _model(config: Translation) -> None:
    strategy = config.get(f"{_ACTOR}.strategy", "fsdp")
    if strategy == "megatron":
        section = f"{_ACTOR}.megatron"
        config.put("policy.megatron_cfg.enabled", True)
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        ):  # fmt: skip
            if config.get(f"{section}.{name}") is not None:
                config.rename(f"{section}.{name}", f"policy.megatron_cfg.{name}")
        recomputes, here = f"{_MODEL}.enable_gradient_checkpointing", "policy.megatron_cfg.recompute"
        if recomputes in config.keys(recomputes):
            config.put(here, "full" if config.get(recomputes) else "none")
            config.answer(recomputes, Kind.RENAMED, here)
    elif strategy not in ("fsdp", "fsdp2"):
        config.refuse(f"{_ACTOR}.strategy", f"training by {strategy}")
    config.follows([f"{_ACTOR}.strategy"], "policy.dtensor_cfg, or policy.megatron_cfg")
    config.put("policy.dtensor_cfg.cpu_offload", bool(config.get(f"{_ACTOR}.fsdp_config.offload_policy")))
    config.unneeded(f"{_ACTOR}.fsdp_config.param_offload", "models free devices for each other automatically")
    rank = config.get(f"{_MODEL}.lora_rank", 0)
    if rank:
        config.put("policy.lora_cfg", {"enabled": True, "dim": rank, "alpha": config.get(f"{_MODEL}.lora_alpha", 16)})
        targets = config.get(f"{_MODEL}.target_modules", "all-linear")
        if targets != "all-linear":
            config.put("policy.lora_cfg.match_all_linear", False)
            config.put("policy.lora_cfg.target_modules", targets if isinstance(targets, list) else [targets])
        if config.get(f"{_MODEL}.exclude_modules"):
            config.put("policy.lora_cfg.exclude_modules", config.get(f"{_MODEL}.exclude_modules"))
    for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
        config.follows([f"{_MODEL}.{name}"], "policy.lora_cfg")
    overrides = config.get(f"{_MODEL}.override_config")
    if overrides:
        config.put("policy.hf_config_overrides", overrides)
    for key in config.keys(f"{_MODEL}.override_config"):
        config.follows([key], "policy.hf_config_overrides")


def _loss(config: Translation) -> None:
    mode = config.get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    if mode not in _AGGREGATIONS:
        config.refuse(f"{_ACTOR}.loss_agg_mode", f"the aggregation {mode}")
    else:
        config.put("loss_fn.aggregation.name", _AGGREGATIONS[mode])
        if mode.endswith("-norm"):
            length = config.get(f"{_ACTOR}.loss_scale_factor") or config.written("policy.generation.max_new_tokens")
            config.put("loss_fn.aggregation.divisor", length)
    config.follows([f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"], "loss_fn.aggregation")
    surrogate = config.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if surrogate not in _SURROGATES:
        config.refuse(f"{_ACTOR}.policy_loss.loss_mode", f"the policy loss {surrogate}")
    clip = config.get(f"{_ACTOR}.clip_ratio", 0.2)
    put_surrogate(
        config,
        _SURROGATES.get(surrogate, "clip"),
        {f"{_ACTOR}.{key}": setting for key, setting in _CLIPS.items()},
        clip_low=config.get(f"{_ACTOR}.clip_ratio_low", clip),
        clip_high=config.get(f"{_ACTOR}.clip_ratio_high", clip),
        dual_clip=config.get(f"{_ACTOR}.clip_ratio_c", 3.0),
    )
    config.follows([f"{_ACTOR}.policy_loss.loss_mode"], "loss_fn.surrogate")
    if surrogate not in ("clip_cov", "kl_cov"):
        for key in config.keys(f"{_ACTOR}.policy_loss"):
            config.unneeded(key, f"the policy loss is {surrogate}")
    _kl(config)


def _kl(config: Translation) -> None:
    in_loss, in_reward = config.get(f"{_ACTOR}.use_kl_loss"), config.get("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        config.refuse("algorithm.use_kl_in_reward", "KL in the loss and in the reward at the same time")
    elif in_loss:
        config.put("loss_fn.kl.weight", config.get(f"{_ACTOR}.kl_loss_coef", 0.001))
        kind = str(config.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"))
        if kind.rstrip("+") not in _KL:
            config.refuse(f"{_ACTOR}.kl_loss_type", f"the KL estimator {kind}")
        else:
            config.put("loss_fn.kl.estimator", _KL[kind.rstrip("+")])
            if kind.endswith("+"):
                config.put("loss_fn.kl.unbiased", True)
    elif in_reward:
        config.put("loss_fn.kl.in_reward", True)
        config.put("loss_fn.kl.weight", config.get("algorithm.kl_ctrl.kl_coef", 0.001))
        config.put("loss_fn.kl.estimator", _KL.get(config.get("algorithm.kl_penalty", "kl"), "k1"))
        if config.get("algorithm.kl_ctrl.type") == "adaptive":
            config.put("loss_fn.kl.target", config.get("algorithm.kl_ctrl.target_kl", 0.1))
            config.put("loss_fn.kl.horizon", config.get("algorithm.kl_ctrl.horizon", 10000))
    else:
        config.put("loss_fn.kl.weight", 0.0)
    for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"):
        config.follows([f"{_ACTOR}.{key}"], "loss_fn.kl.weight")
    for key in (*config.keys("algorithm.kl_ctrl"), "algorithm.use_kl_in_reward", "algorithm.kl_penalty"):
        config.follows([key], "loss_fn.kl.weight")


def _generation(config: Translation) -> None:
    engine = config.get(f"{_ROLLOUT}.name", "vllm")
    if engine not in ("vllm", "hf"):
        config.refuse(f"{_ROLLOUT}.name", f"generation by {engine}")
    config.put("policy.generation.backend", engine if engine in ("vllm", "hf") else "vllm")
    config.follows([f"{_ROLLOUT}.name"], "policy.generation.backend")
    for key, here in (("top_k", "top_k"), ("val_kwargs.top_k", "val_top_k")):
        if config.get(f"{_ROLLOUT}.{key}", -1) > 0:
            config.put(f"policy.generation.{here}", config.get(f"{_ROLLOUT}.{key}"))
        config.follows([f"{_ROLLOUT}.{key}"], f"policy.generation.{here}; -1 samples from all tokens")
    if config.get(f"{_ROLLOUT}.val_kwargs.do_sample") is False:
        config.put("policy.generation.val_temperature", 0.0)
        config.follows(
            [f"{_ROLLOUT}.val_kwargs.temperature"], "policy.generation.val_temperature: 0, as do_sample is false"
        )
    if not config.get(f"{_ROLLOUT}.multi_turn.enable"):
        for key in config.keys(f"{_ROLLOUT}.multi_turn"):
            config.unneeded(key, "rollouts have one turn")
    if config.get(f"{_ROLLOUT}.tensor_model_parallel_size") is None:
        config.put("policy.generation.vllm_cfg.tensor_parallel_size", 2)
        config.notes.append("policy.generation.vllm_cfg.tensor_parallel_size: 2, verl's default")


def _data(config: Translation) -> None:
    for key, purpose in (("train_files", "train"), ("val_files", "validation")):
        files = config.get(f"data.{key}")
        several = files if isinstance(files, list) else [files] if files else []
        made = [{"data_path": each, "processor": "dapo_math"} for each in several]
        if made:
            config.put(f"data.{purpose}", made if len(made) > 1 else made[0])
        config.follows([f"data.{key}"], f"data.{purpose}.data_path")
    if config.get("data.prompt_key", "prompt") != "prompt":
        config.put("data.default.columns", {"prompt": config.get("data.prompt_key")})
    config.follows(["data.prompt_key"], "data.default.columns: prompt")
    if config.written("data.train") is None:
        config.put("data.train", {"data_path": "train.parquet", "processor": "dapo_math"})
        config.notes.append("data.train.data_path: the file does not contain data. Set your own")
    path = config.get("custom_reward_function.path", config.get("reward.custom_reward_function.path"))
    name = config.get("custom_reward_function.name", "compute_score")
    scorer = f"{Path(str(path)).name}:{name}" if path else "verl's scorer by data_source"
    config.notes.append(
        f"data.default.env_name: name what scores responses, in place of {scorer}: an environment such as math, or a "
        "function of your own, FILE.py:NAME (docs/rewards-and-environments.md has its parameters)"
    )
    config.notes.append("data: processor dapo_math reads verl's rows, `prompt` and `reward_model.ground_truth`")
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        for key in config.keys(section):
            config.follows([key], "data.default.env_name, which the recipe leaves to you")
    kwargs = config.get("data.apply_chat_template_kwargs")
    if kwargs:
        config.put("policy.tokenizer.chat_template_kwargs", kwargs)
    tokenizer = config.get("data.tokenizer")
    if tokenizer:
        config.put("policy.tokenizer.name", tokenizer)
    most = config.get("data.val_max_samples", -1)
    if most > 0:
        config.put(f"{config.algorithm}.max_val_samples", most)


def _trainer(config: Translation) -> None:
    loop = config.algorithm
    steps = config.get("trainer.total_training_steps")
    if steps:
        config.put(f"{loop}.max_num_steps", steps)
    else:
        config.put(f"{loop}.max_num_epochs", config.get("trainer.total_epochs", 30))
        config.put(f"{loop}.max_num_steps", 1_000_000)
        config.follows(["trainer.total_epochs"], f"{loop}.max_num_epochs")
    for key, here in (("save_freq", "checkpointing.save_period"), ("test_freq", f"{loop}.val_period")):
        config.put(here, max(0, config.get(f"trainer.{key}", -1)))
        config.follows([f"trainer.{key}"], f"{here}; 0 for -1")
    if config.written("data.validation") is None:
        config.put(f"{loop}.val_period", 0)
        config.unneeded("trainer.val_before_train", "there is nothing to validate on")
    elif config.get("trainer.val_before_train") is None:
        config.put(f"{loop}.val_at_start", True)
    trackers = config.get("trainer.logger", [])
    several = trackers if isinstance(trackers, list) else [trackers]
    for tracker in ("wandb", "mlflow", "tensorboard"):
        config.put(f"logger.{tracker}_enabled", tracker in several)
    other = ", ".join(str(each) for each in several if each not in ("wandb", "mlflow", "tensorboard", "console"))
    config.follows(["trainer.logger"], f"logger.*_enabled{f'; {other} is not offered' if other else ''}")
    if config.get("trainer.max_actor_ckpt_to_keep") is None:
        config.put("checkpointing.keep_top_k", None)
    for key in config.keys("actor_rollout_ref.actor.optim"):
        rule = config.table.rule(key)
        if rule is None and config.get(key) is None:
            config.answer(key, Kind.NOT_NEEDED, "unset")
