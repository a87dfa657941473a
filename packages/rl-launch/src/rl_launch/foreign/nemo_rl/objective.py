"""The section of the algorithm, and its loss."""

from __future__ import annotations

from rl_launch.foreign.nemo_rl.loops import ROLLOUTS
from rl_launch.foreign.translation import Translation, put_surrogate

_SURROGATES = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "disable_ppo_ratio": "reinforce"}
_CLIPS = {"ratio_clip_min": "clip_low", "ratio_clip_max": "clip_high", "ratio_clip_c": "dual_clip"}
"""Switches of NeMo RL's loss by the surrogate that they are, and its clips by the surrogate's settings."""


def translate_loop(config: Translation) -> None:
    """Answer the keys of the algorithm's section."""
    loop = config.algorithm
    if loop == "sft":
        config.put("sft.learn", "last" if config.get("sft.only_unmask_final") else "all")
        config.follows(["sft.only_unmask_final"], "sft.learn")
    if loop in ("dpo",):
        average = config.get("dpo.sft_average_log_probs")
        if average is None:
            config.unneeded("dpo.sft_average_log_probs", "it follows dpo.preference_average_log_probs")
    for name in ("max_num_steps", "max_num_epochs", "val_batches", "max_val_samples"):
        if config.get(f"{loop}.{name}") == -1:
            config.unneeded(f"{loop}.{name}", "-1 means no limit, which is the default")
            if name == "max_num_steps" and loop in ROLLOUTS:
                config.put(f"{loop}.{name}", 1_000_000)
    period = config.get(f"{loop}.val_period")
    if period is not None and period <= 0:
        config.put(f"{loop}.val_period", 0)
        config.follows([f"{loop}.val_period"], f"{loop}.val_period: 0, which turns validation off")
    if loop == "ppo":
        _critic(config)
    if loop not in ROLLOUTS:
        return
    section = f"{loop}.async_grpo"
    if not config.get(f"{section}.in_flight_weight_updates"):
        config.unneeded(
            f"{section}.recompute_kv_cache_after_weight_updates", "no completions are in progress during an update"
        )
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


def _surrogate(config: Translation) -> None:
    chosen = [switch for switch in _SURROGATES if config.get(f"loss_fn.{switch}")]
    if len(chosen) > 1:
        config.refuse(f"loss_fn.{chosen[1]}", f"two policy losses at once: {' and '.join(chosen)}")
    name = _SURROGATES[chosen[0]] if chosen else "clip"
    put_surrogate(config, name, {f"loss_fn.{theirs}": setting for theirs, setting in _CLIPS.items()})
    config.follows([f"loss_fn.{switch}" for switch in _SURROGATES], f"loss_fn.surrogate: {name}")
    by_token = config.get("loss_fn.token_level_loss")
    if by_token is not None:
        config.put("loss_fn.aggregation", "token-mean" if by_token else "sequence-mean")
        config.follows(["loss_fn.token_level_loss"], "loss_fn.aggregation")


def _importance(config: Translation) -> None:
    switch = "loss_fn.use_importance_sampling_correction"
    if config.get(switch):
        config.put("loss_fn.importance", {})
        config.follows([switch], "loss_fn.importance")
        return
    config.unneeded(switch, "loss_fn.importance is off unless it is set")
    for name in ("type", "ratio", "ratio_min"):
        config.unneeded(f"loss_fn.truncated_importance_sampling_{name}", f"{switch} is false")


def translate_loss(config: Translation) -> None:
    """Answer the keys of `loss_fn`."""
    _surrogate(config)
    _importance(config)
    if config.get("loss_fn.reference_policy_kl_penalty") == 0:
        for name in ("use_on_policy_kl_approximation", "use_kl_in_reward"):
            config.unneeded(f"loss_fn.{name}", "loss_fn.reference_policy_kl_penalty is 0")
    if config.get("loss_fn.force_on_policy_ratio") is False:
        config.unneeded("loss_fn.force_on_policy_ratio", "unset skips a pass if the result is the same")
    outside = "loss_fn.zero_outside_topk"
    if config.algorithm == "distillation" and config.has(outside) and not config.get(outside):
        config.notes.append(
            "loss_fn: here all tokens outside the teacher's top k count as one, the tail, in the divergence"
        )
