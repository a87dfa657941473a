"""The loss that `loss_fn` describes: the policy loss, or a class of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from rl_algos.losses.custom import PATH, is_path, loss_class, unknown_name
from rl_algos.losses.policy import PolicyLoss, surrogate_column
from rl_algos.losses.surrogates import SURROGATES, ClipCov, KLCov, Surrogate
from rl_algos.policy_gradient.config import CustomLossConfig, LossConfig, ObjectiveRoot
from rl_algos.policy_gradient.objective import (
    AdaptiveEntropy,
    AdaptiveKL,
    Objective,
    Statistic,
    by_environment,
    high_covariance,
    high_entropy,
    positive_examples,
    rollouts_of_rows,
    small_moment,
)
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Config, section_of, settings_of
from rl_core.data.microbatch import PAIR
from rl_core.model import Loss
from rl_core.weights import Weights

COLUMNS = ("loss_mask", "advantages", "generation_logprobs", "prev_logprobs", "ref_logprobs")
"""Columns of a batch that a loss may read, in addition to `tokens`."""

_DERIVED = ("temperature", "token_filter", "implementation")


def loss_section(name: str | None) -> type[Config]:
    """Return the type of `loss_fn`: the name of a loss and its settings.

    Raises:
        ValueError: If there is no such loss, or its class is not a loss.
        ModuleNotFoundError: If its package is not installed.
    """
    if name in (None, LossConfig().name):
        return LossConfig
    if not is_path(str(name)):
        raise unknown_name(str(name), [LossConfig().name], others=PATH)
    return section_of(loss_class(str(name)), CustomLossConfig, derived=_DERIVED)


def surrogate_section(name: str | None) -> type[Surrogate]:
    """Return the type of `loss_fn.surrogate`: the surrogate itself.

    Raises:
        ValueError: If there is no such surrogate.
    """
    name = LossConfig().surrogate.name if name is None else name
    if name not in SURROGATES:
        raise unknown_name(name, SURROGATES)
    return SURROGATES[name]


def policy_loss_of(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Loss:
    """Return the loss of a run.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
    """
    if isinstance(config.loss_fn, LossConfig):
        return policy_loss(config, algorithm, config.loss_fn)
    kind = loss_class(config.loss_fn.name)
    fields = {field.name for field in dataclasses.fields(kind)}
    generation = config.policy.generation
    token_filter = algorithm.token_filter(generation)
    derived: Mapping[str, Any] = {"temperature": generation.temperature, "token_filter": token_filter}
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
    """Return the loss of a run with the computations that it needs once a step.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
        read_before: Columns that its advantages read among the reads of the policy before the update.
        weights: Weights of the policy, whose version gives the age of rollouts; None if no step is taken with the loss.
    """
    loss, settings, exact = policy_loss_of(config, algorithm), config.loss_fn, config.policy.generation.exact
    statistics: dict[str, Statistic] = {}
    if algorithm.splits and PAIR in loss.columns:
        statistics[PAIR] = rollouts_of_rows
    if not isinstance(settings, LossConfig):
        return Objective(loss, statistics=statistics, read_before=read_before, exact=exact)
    assert isinstance(loss, PolicyLoss)
    if isinstance(loss.surrogate, ClipCov | KLCov):
        statistics["high_covariance"] = high_covariance(loss.surrogate, algorithm.seed)
    if settings.filters.top_entropy_share is not None:
        statistics["high_entropy"] = high_entropy(settings.filters.top_entropy_share)
        read_before = (*read_before, "prev_entropy")
    if settings.filters.max_second_moment is not None:
        statistics["small_moment"] = small_moment(settings.filters.max_second_moment)
    for setting in loss.surrogate_by_row:
        own = {
            name: values[setting] for name, values in algorithm.surrogate_by_environment.items() if setting in values
        }
        statistics[surrogate_column(setting)] = by_environment(loss.surrogate.by_row[setting], own)
    if loss.positive_example_nll_weight:
        statistics["positive"] = positive_examples
    kl, bonus = settings.kl, settings.entropy_bonus
    return Objective(
        loss,
        statistics=statistics,
        read_before=read_before,
        weights=weights,
        reward_kl=kl if kl.is_in_reward else None,
        kl_weight=AdaptiveKL(kl, rollouts_per_step=algorithm.rollouts_per_step) if kl.target else None,
        entropy_weight=AdaptiveEntropy(bonus) if bonus.target else None,
        exact=exact,
    )


def columns_of(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> frozenset[str]:
    """Return the columns that the loss of a run reads; none for a loss that cannot be created, which the plugin's
    checks report."""
    try:
        return objective_of(config, algorithm).columns
    except (ValueError, TypeError):
        return frozenset()


def policy_loss(config: ObjectiveRoot, algorithm: PolicyGradientConfig, loss: LossConfig) -> PolicyLoss:
    """Return the policy loss: the sections of its config in use, with values that follow from the rest of the
    config."""
    on_policy = has_one_update(config, algorithm) and not needs_prev(loss)
    return PolicyLoss(
        surrogate=loss.surrogate,
        aggregation=loss.aggregation,
        ratio_denominator=loss.ratio_denominator,
        on_policy=on_policy if loss.force_on_policy_ratio is None else loss.force_on_policy_ratio,
        kl=loss.kl if loss.kl.is_in_loss else None,
        importance=loss.importance and loss.importance.at_level(loss.surrogate.level),
        staleness=loss.staleness,
        filters=loss.filters,
        entropy_bonus=loss.entropy_bonus if loss.entropy_bonus.is_on else None,
        positive_example_nll_weight=loss.positive_example_nll_weight,
        observation_nll_weight=loss.observation_nll_weight,
        demonstrations=loss.demonstrations,
        surrogate_by_row=tuple(loss.surrogate.by_row) if algorithm.surrogate_by_environment else (),
        mismatch_threshold=algorithm.seq_logprob_error_threshold,
        has_segments=algorithm.splits,
        temperature=config.policy.generation.temperature,
        token_filter=algorithm.token_filter(config.policy.generation),
    )


def has_one_update(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> bool:
    """Return whether a step takes one optimizer step of the policy."""
    return config.policy.train_global_batch_size == algorithm.rollouts_per_step and algorithm.passes_per_step == 1


def needs_prev(loss: LossConfig) -> bool:
    """Return whether `prev_logprobs` have to be read before the update, even if it is the only one of the step."""
    normalizes = loss.importance is not None and loss.importance.batch_normalize
    measures = isinstance(loss.surrogate, ClipCov | KLCov) or loss.filters.max_second_moment is not None
    return normalizes or measures
