"""A whole config of NeMo RL: the keys that are computed from several. The others are in
`foreign_keys/tables/nemo-rl.yaml`."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.nemo_rl.data import ROLLOUTS, datasets_in, translate_data
from rl_launch.foreign.nemo_rl.evaluation import translate_evaluation
from rl_launch.foreign.nemo_rl.generation import translate_asynchrony, translate_generation
from rl_launch.foreign.nemo_rl.model import translate_model
from rl_launch.foreign.translation import Translation, put_surrogate
from rl_launch.foreign_keys.table import Kind

_ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
"""Sections that choose the script of NeMo RL, and the algorithm here."""
_SURROGATES = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "disable_ppo_ratio": "reinforce"}
"""Surrogates by the switches of NeMo RL's loss."""
_CLIPS = {"ratio_clip_min": "clip_low", "ratio_clip_max": "clip_high", "ratio_clip_c": "dual_clip"}
"""Settings of surrogates by the clips of NeMo RL's loss."""


def algorithm_of(values: dict[str, Any]) -> str:
    """Return the algorithm of a config by its sections; empty if none of them decides it."""
    found = [name for name in _ALGORITHMS if isinstance(values.get(name), dict)]
    if not found and isinstance(values.get("eval"), dict) and isinstance(values.get("generation"), dict):
        return "evaluation"
    return found[0] if len(found) == 1 else "grpo" if "grpo" in found else ""


def translate(config: Translation) -> None:
    """Answer the keys that need more than a table, then the others."""
    config.put("algorithm", config.algorithm)
    if config.algorithm == "evaluation":
        translate_evaluation(config)
    else:
        _translate_training(config)
    config.finish()
    config.put("cluster.device", "cuda")


def _translate_training(config: Translation) -> None:
    if config.get("teachers"):
        for section in ("teachers", "teacher", "token_aligner", "distillation"):
            config.refuse(section, "distillation of logits across tokenizers from given text (teachers, xtoken)")
    if config.get("on_policy_distillation.enabled"):
        config.refuse("on_policy_distillation", "on-policy distillation inside GRPO (on_policy_distillation)")
    if config.get("policy.draft.enabled"):
        config.unneeded("policy.draft", "a draft model does not change what is sampled")
        config.notes.append(
            "policy.draft: the EAGLE head is not trained, and speculative decoding is off. policy.draft_head trains "
            "one, with dtensor_cfg and policy.generation.vllm_cfg.speculation"
        )
    translate_asynchrony(config)
    translate_generation(config)
    for model in ("policy", "value", "teacher"):
        if isinstance(config.values.get(model), dict):
            translate_model(config, model)
    if config.algorithm in ("dpo", "rm"):
        for key, here in (
            ("policy.train_micro_batch_size", "policy.train_micro_batch_size"),
            ("policy.logprob_batch_size", "policy.logprob_batch_size"),
            (f"{config.algorithm}.val_micro_batch_size", "policy.logprob_batch_size"),
        ):
            count = config.get(key)
            if count is not None:
                if config.written(here) is None:
                    config.put(here, 2 * count)
                config.follows([key], f"{here}, counted in rows, two for a pair")
    _translate_loop(config)
    _translate_loss(config)
    translate_data(config)
    _translate_environments(config)
    _translate_validation(config)
    named = ("project", "name")
    for name, keys in {
        "wandb": named,
        "mlflow": ("experiment_name", "run_name", "tracking_uri"),
        "swanlab": named,
    }.items():
        if not config.get(f"logger.{name}_enabled"):
            config.unneeded(f"logger.{name}", f"logger.{name}_enabled is false")
        for each in keys:
            if config.get(f"logger.{name}.{each}") is not None:
                config.rename(f"logger.{name}.{each}", f"logger.{name}.{each}")


# The section of the algorithm, and its loss


def _translate_loop(config: Translation) -> None:
    loop = config.algorithm
    if loop == "sft":
        config.put("sft.learn", "last" if config.get("sft.only_unmask_final") else "all")
    if config.get("dpo.sft_average_log_probs") is None:
        config.unneeded("dpo.sft_average_log_probs", "it follows dpo.preference_average_log_probs")
    for name in ("max_num_steps", "max_num_epochs", "val_batches", "max_val_samples"):
        if config.get(f"{loop}.{name}") == -1:
            config.unneeded(f"{loop}.{name}", "-1 means no limit, which is the default")
            if name == "max_num_steps" and loop in ROLLOUTS:
                config.put(f"{loop}.{name}", 1_000_000)
    period = config.get(f"{loop}.val_period")
    if period is not None and period <= 0:
        config.compute(
            f"{loop}.val_period", f"{loop}.val_period", 0, f"{loop}.val_period: 0, which turns validation off"
        )
    if loop == "ppo":
        _translate_critic(config)
    if loop not in ROLLOUTS:
        return
    section = f"{loop}.async_grpo"
    if not config.get(f"{section}.in_flight_weight_updates"):
        key = f"{section}.recompute_kv_cache_after_weight_updates"
        config.unneeded(key, "no completions are in progress during an update")
    if loop == "grpo" and config.has("grpo.adv_estimator"):
        section, shared = "grpo.adv_estimator", ("normalize_rewards", "use_leave_one_out_baseline")
        name = config.get(f"{section}.name")
        for key in shared:
            value = config.get(f"{section}.{key}")
            if value is not None:
                config.compute(f"grpo.{key}", f"grpo.{key}", value)
        if name == "reinforce_plus_plus":
            baseline = config.get(f"{section}.minus_baseline", True)
            config.put(f"{section}.name", f"{name}_baseline" if baseline else name)
        elif name == "gdpo":
            config.put(f"{section}.name", name)
        elif name not in (None, "grpo"):
            config.refuse(f"{section}.name", f"the advantage estimator {name}")
        for key in shared if config.written(f"{section}.name") else ():
            config.remove(f"grpo.{key}")
    if not config.get(f"{loop}.reward_shaping.enabled"):
        config.unneeded(f"{loop}.reward_shaping", "rewards are not shaped")
    if config.get(f"{loop}.reward_scaling.enabled") is False:
        config.unneeded(f"{loop}.reward_scaling", "rewards are not scaled")


def _translate_critic(config: Translation) -> None:
    section = "ppo.adv_estimator"
    config.put("ppo.gae_lambda", config.get(f"{section}.gae_lambda_policy", config.get(f"{section}.gae_lambda", 0.95)))
    returns = config.get(f"{section}.gae_lambda_value")
    if returns is not None:
        config.put("ppo.critic_gae_lambda", returns)
    if alpha := config.get(f"{section}.length_adaptive_alpha"):
        config.put("ppo.length_adaptive_alpha", alpha)
    name = config.get(f"{section}.name", "gae")
    if name != "gae":
        config.refuse(f"{section}.name", f"the advantage estimator {name} in PPO")
    scale = config.get("value_loss_fn.scale", 1.0)
    if scale not in (1, None) and config.written("value.optimizer.name") in (None, "torch.optim.AdamW"):
        # AdamW takes the same steps for any scale of the loss, except for the clip of the gradient and epsilon.
        if norm := config.get("value.max_grad_norm"):
            config.put("value.max_grad_norm", norm / scale)
            config.follows(["value.max_grad_norm"], "value.max_grad_norm, divided by value_loss_fn.scale")
    else:
        config.unneeded("value_loss_fn.scale", "1")


def _translate_loss(config: Translation) -> None:
    chosen = [switch for switch in _SURROGATES if config.get(f"loss_fn.{switch}")]
    if len(chosen) > 1:
        config.refuse(f"loss_fn.{chosen[1]}", f"two policy losses at once: {' and '.join(chosen)}")
    name = _SURROGATES[chosen[0]] if chosen else "clip"
    put_surrogate(config, name, {f"loss_fn.{theirs}": setting for theirs, setting in _CLIPS.items()})
    by_token = config.get("loss_fn.token_level_loss")
    if by_token is not None:
        config.put("loss_fn.aggregation", "token-mean" if by_token else "sequence-mean")
    switch = "loss_fn.use_importance_sampling_correction"
    if config.get(switch):
        config.put("loss_fn.importance", {})
    else:
        config.unneeded(switch, "loss_fn.importance is off unless it is set")
        for each in ("type", "ratio", "ratio_min"):
            config.unneeded(f"loss_fn.truncated_importance_sampling_{each}", f"{switch} is false")
    if config.get("loss_fn.reference_policy_kl_penalty") == 0:
        for each in ("use_on_policy_kl_approximation", "use_kl_in_reward"):
            config.unneeded(f"loss_fn.{each}", "loss_fn.reference_policy_kl_penalty is 0")
    if config.get("loss_fn.force_on_policy_ratio") is False:
        config.unneeded("loss_fn.force_on_policy_ratio", "unset skips a pass if the result is the same")
    outside = "loss_fn.zero_outside_topk"
    if config.algorithm == "distillation" and config.has(outside) and not config.get(outside):
        config.notes.append(
            "loss_fn: here all tokens outside the teacher's top k count as one, the tail, in the divergence"
        )


# Environments


def _translate_environments(config: Translation) -> None:
    _translate_sliding_puzzle(config)
    used = [config.written("data.default") or {}]
    used += [each for purpose in ("train", "validation") for each in datasets_in(config.written(f"data.{purpose}"))]
    names = {each["env_name"] for each in used if each.get("env_name")}
    if "reward_model" in names:
        _translate_reward_model(config)
    for name in config.get("env") or {}:
        if name == "nemo_gym":
            config.refuse(f"env.{name}", "NeMo Gym environments (env.nemo_gym)")
        elif name not in names:
            config.unneeded(f"env.{name}", "no dataset uses this environment")
    if config.algorithm not in ROLLOUTS:
        config.unneeded("env", f"{config.algorithm} scores nothing")
    verifier = config.get("env.math.math_verify_impl")
    if verifier == "dapo_math_verify":
        config.put("env.math.answer_format", "dapo")
        config.put("env.math.wrong_reward", -1.0)
    elif verifier in (None, "hf_math_verify"):
        config.unneeded("env.math.math_verify_impl", "answers are compared by math-verify")
    if config.get("env.math.verifier_type") in ("multilingual_multichoice", "english_multichoice"):
        config.compute("env.math.verifier_type", "env.math.answer_format", "choice", "env.math.answer_format: choice")
    else:
        config.unneeded("env.math.verifier_type", "answers are compared by math-verify")


def _translate_sliding_puzzle(config: Translation) -> None:
    """Answer the keys of the puzzles of NeMo RL's example, which its script makes without a section of data."""
    section = "env.sliding_puzzle_game"
    if not config.has(section):
        return
    size = config.get(f"{section}.cfg.game_config.size", 3)
    moves = config.get(f"{section}.cfg.game_config.shuffle_moves")
    if size not in (3, None):
        config.refuse(f"{section}.cfg.game_config.size", f"sliding puzzles of {size} x {size} tiles")
    settings = {"max_moves": moves} if moves else {}
    if not isinstance(config.written("data.train"), dict) or not config.written("data.train"):
        for purpose, number in (("train", 10000), ("validation", 256)):
            config.put(f"data.{purpose}", {"dataset_name": "sliding_puzzle", "settings": {**settings, "size": number}})
    config.put("env.sliding_puzzle.max_moves", config.get(f"{section}.cfg.max_moves", 20))
    config.follows([section], "env.sliding_puzzle, and data.train.dataset_name: sliding_puzzle")
    config.unneeded("data.add_system_prompt", "the dataset creates the prompts")


def _translate_reward_model(config: Translation) -> None:
    section = "env.reward_model"
    if config.get(f"{section}.model_name") is None:
        return
    for name, here in (("model_name", "model"), ("max_model_len", "max_length"), ("precision", "precision")):
        if config.get(f"{section}.{name}") is not None:
            config.rename(f"{section}.{name}", f"{section}.{here}")
    config.unneeded(section, "a reward model runs in the processes of its environment (env.reward_model.device)")
    config.notes.append(f"{section}.device: cpu is the default. Set a separate GPU for a large reward model")


# Validation


def _translate_validation(config: Translation) -> None:
    """Answer the keys of validation, and the metric that ranks checkpoints."""
    loop, key = config.algorithm, "checkpointing.metric_name"
    holds_out = any(each.get("split_validation_size") for each in datasets_in(config.written("data.train")))
    has_data = config.written("data.validation") is not None or holds_out
    period = config.get(f"{loop}.val_period", 0) or 0
    is_at_ends = config.get(f"{loop}.val_at_start") or config.get(f"{loop}.val_at_end")
    if not has_data:
        for each in ("val_period", "val_at_start", "val_at_end", "val_batches", "val_global_batch_size"):
            config.unneeded(f"{loop}.{each}", "there is nothing to validate on")
            config.remove(f"{loop}.{each}")
        if loop in ("sft", "dpo", "rm"):
            config.put(f"{loop}.val_period", 0)
    name = config.get(key)
    if name is None:
        return
    scope, _, metric = name.replace("/", ":").partition(":") if ":" in name or "/" in name else name.partition("_")
    if scope != "val":
        config.put(key, f"train:{metric}")
        config.answer(key, Kind.SAME if ":" in name else Kind.FOLLOWS, key)
    elif not has_data or not (period > 0 or is_at_ends):
        config.unneeded(key, "this run does not validate; the newest checkpoints are kept")
        config.unneeded("checkpointing.higher_is_better", "no metric ranks checkpoints")
    else:
        is_known = metric in ("accuracy", "loss", "reward", "mean_length")
        here = f"val:{metric}" if is_known else "val:loss" if metric.endswith("loss") else "val:accuracy"
        if loop in ("sft", "dpo", "rm") and "accuracy" not in metric:
            here = "val:loss"
        config.put(key, here)
        config.answer(key, Kind.SAME if here == name else Kind.FOLLOWS, f"{key}: {here}")
