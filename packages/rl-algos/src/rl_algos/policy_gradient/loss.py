"""The loss that `loss_fn` describes: the policy loss, or a class of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from rl_algos.losses.aggregation import Aggregation
from rl_algos.losses.custom import PATH, is_path, loss_class
from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.losses.kl import KLPenalty
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.staleness import StalenessDecay
from rl_algos.losses.surrogates import SURROGATES, ClipCov, KLCov, Surrogate
from rl_algos.policy_gradient.adaptive import AdaptiveEntropy, AdaptiveKL
from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.policy_gradient.loss_config import CustomLossConfig, LossConfig, RejectionConfig, SurrogateConfig
from rl_algos.policy_gradient.objective import Objective, RewardKL
from rl_algos.policy_gradient.step_statistics import (
    Statistic,
    high_covariance,
    high_entropy,
    positive_examples,
    rollouts_of_rows,
)
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Config, did_you_mean, section_of, settings_of
from rl_core.data.microbatch import PAIR
from rl_core.model import Loss
from rl_core.weights import Weights

COLUMNS = ("loss_mask", "advantages", "generation_logprobs", "prev_logprobs", "ref_logprobs")
"""Columns of a batch that a loss may read, beside `tokens`."""

CLIP_KEYS = {"clip_low": "ratio_clip_min", "clip_high": "ratio_clip_max", "dual_clip": "ratio_clip_c"}
"""Fields of surrogates that have a key of `loss_fn` in common, and that key."""

SWITCHES = {"sequence_level_importance_ratios": "gspo", "use_cispo": "cispo", "disable_ppo_ratio": "reinforce"}
"""Keys of `loss_fn` that choose a surrogate, and which."""

_DERIVED = ("temperature", "token_filter", "implementation")


def loss_section(name: str | None) -> type[Config]:
    """The type of `loss_fn`: the name of a loss and its settings.

    Raises:
        ValueError: if there is no such loss, or its class is not a loss.
        ModuleNotFoundError: if its package is not installed.
    """
    if name in (None, LossConfig().name):
        return LossConfig
    if not is_path(str(name)):
        raise ValueError(f"got {name!r}; allowed: {LossConfig().name}, or {PATH}")
    return section_of(loss_class(str(name)), CustomLossConfig, derived=_DERIVED)


def surrogate_section(name: str | None) -> type[Config]:
    """The type of `loss_fn.surrogate`: the name of a surrogate and its settings.

    Raises:
        ValueError: if there is no such surrogate.
    """
    if name is None:
        return SurrogateConfig
    if name not in SURROGATES:
        raise ValueError(f"got {name!r}{did_you_mean(name, SURROGATES)}; allowed: {', '.join(SURROGATES)}")
    return section_of(SURROGATES[name], SurrogateConfig, derived=tuple(CLIP_KEYS))


def surrogate_name(loss: LossConfig) -> str:
    """Name of the surrogate in force."""
    switched = [name for key, name in SWITCHES.items() if getattr(loss, key)]
    return loss.surrogate.name or (switched[0] if switched else "clip")


def surrogate_of(loss: LossConfig) -> Surrogate:
    """The surrogate in force, with its settings."""
    kind = SURROGATES[surrogate_name(loss)]
    fields = {field.name for field in dataclasses.fields(kind)}
    shared = {field: getattr(loss, key) for field, key in CLIP_KEYS.items() if field in fields}
    return kind(**shared, **settings_of(loss.surrogate))


def loss_of(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Loss:
    """The loss of a run.

    Args:
        algorithm: section of the algorithm.
    """
    if isinstance(config.loss_fn, LossConfig):
        return policy_loss(config, algorithm, config.loss_fn)
    kind = loss_class(config.loss_fn.name)
    fields = {field.name for field in dataclasses.fields(kind)}
    generation = config.policy.generation
    derived: Mapping[str, Any] = {"temperature": generation.temperature, "token_filter": generation.token_filter}
    settings = {**settings_of(config.loss_fn), **{key: derived[key] for key in fields & derived.keys()}}
    loss: Loss = kind(**settings)
    return loss


def objective_of(
    config: ObjectiveRoot,
    algorithm: PolicyGradientConfig,
    *,
    read_before: Collection[str] = (),
    weights: Weights | None = None,
) -> Objective:
    """The loss of a run with what is computed once a step for it.

    Args:
        algorithm: section of the algorithm.
        read_before: columns that its advantages read, of those that the policy gives before the update.
        weights: of the policy, whose version tells the age of rollouts; None if no step is taken with the loss.
    """
    loss, settings = loss_of(config, algorithm), config.loss_fn
    statistics: dict[str, Statistic] = {}
    if algorithm.splits and PAIR in loss.columns:
        statistics[PAIR] = rollouts_of_rows
    if not isinstance(settings, LossConfig):
        return Objective(loss, statistics=statistics, read_before=read_before)
    assert isinstance(loss, PolicyLoss)
    if isinstance(loss.surrogate, ClipCov | KLCov):
        statistics["high_covariance"] = high_covariance(loss.surrogate, algorithm.seed)
    if settings.top_entropy_share is not None:
        statistics["high_entropy"] = high_entropy(settings.top_entropy_share)
        read_before = (*read_before, "prev_entropy")
    if loss.positive_nll_weight:
        statistics["positive"] = positive_examples
    kl, bonus = settings.adaptive_kl, settings.entropy_bonus
    penalty = settings.reference_policy_kl_penalty
    rate = algorithm.rollouts_per_step / kl.horizon
    return Objective(
        loss,
        statistics=statistics,
        read_before=read_before,
        weights=weights,
        reward_kl=_reward_kl(settings) if settings.use_kl_in_reward and penalty else None,
        kl_weight=AdaptiveKL(penalty, target=kl.target, rate=rate) if kl.target else None,
        entropy_weight=(
            AdaptiveEntropy(bonus.weight, target=bonus.target, step=bonus.weight_step) if bonus.target else None
        ),
    )


def columns_of(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> frozenset[str]:
    """Columns that the loss of a run reads; none of a loss that cannot be made, which the plugin's checks report."""
    try:
        return objective_of(config, algorithm).columns
    except (ValueError, TypeError):
        return frozenset()


def policy_loss(config: ObjectiveRoot, algorithm: PolicyGradientConfig, loss: LossConfig) -> PolicyLoss:
    """The policy loss."""
    surrogate = surrogate_of(loss)
    on_policy = has_one_update(config, algorithm) and not needs_prev(loss)
    bonus = loss.entropy_bonus
    return PolicyLoss(
        surrogate=surrogate,
        aggregation=aggregation_of(loss),
        denominator=loss.ratio_denominator,
        on_policy=on_policy if loss.force_on_policy_ratio is None else loss.force_on_policy_ratio,
        kl=_kl(loss) if loss.reference_policy_kl_penalty and not loss.use_kl_in_reward else None,
        importance=_importance(loss, surrogate) if loss.use_importance_sampling_correction else None,
        staleness=StalenessDecay(loss.staleness_decay) if loss.staleness_decay < 1 else None,
        off_policy_threshold=loss.off_policy_sequence_mask_threshold,
        mismatch_threshold=algorithm.seq_logprob_error_threshold,
        entropy_weight=bonus.weight if bonus.weight or bonus.target else None,
        high_entropy_only=loss.top_entropy_share is not None,
        positive_nll_weight=loss.positive_example_nll_weight,
        has_segments=algorithm.splits,
        temperature=config.policy.generation.temperature,
        token_filter=config.policy.generation.token_filter,
    )


def has_one_update(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> bool:
    """Whether a step takes one optimizer step of the policy."""
    return config.policy.train_global_batch_size == algorithm.rollouts_per_step and algorithm.passes_per_step == 1


def needs_prev(loss: LossConfig) -> bool:
    """Whether `prev_logprobs` have to be read before the update, even if it is the only one of the step."""
    has_weights = loss.use_importance_sampling_correction and loss.importance_sampling_batch_normalize
    return has_weights or issubclass(SURROGATES[surrogate_name(loss)], ClipCov | KLCov)


def aggregation_of(loss: LossConfig) -> Aggregation:
    """The aggregation in force."""
    name = loss.aggregation or ("token-mean" if loss.token_level_loss else "sequence-mean")
    return Aggregation(name, divisor=loss.aggregation_divisor or 1.0)


def _kl(loss: LossConfig) -> KLPenalty:
    return KLPenalty(
        weight=loss.reference_policy_kl_penalty,
        estimator=loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
        unbiased=loss.reference_policy_kl_unbiased,
        from_generation=loss.use_on_policy_kl_approximation,
    )


def _reward_kl(loss: LossConfig) -> RewardKL:
    return RewardKL(
        weight=loss.reference_policy_kl_penalty,
        estimator=loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )


def _importance(loss: LossConfig, surrogate: Surrogate) -> ImportanceCorrection:
    return ImportanceCorrection(
        truncation=loss.truncated_importance_sampling_type,
        low=loss.truncated_importance_sampling_ratio_min,
        high=loss.truncated_importance_sampling_ratio,
        level=loss.importance_sampling_level or surrogate.level,
        rejection=_rejection(loss.importance_sampling_rejection),
        batch_normalize=loss.importance_sampling_batch_normalize,
    )


def _rejection(rejection: RejectionConfig) -> Rejection | None:
    if rejection.high is None and rejection.low is None:
        return None
    return Rejection(rejection.statistic, rejection.estimator, high=rejection.high, low=rejection.low)
