"""Settings of the policy loss that contradict one another, or would have no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rl_algos.losses.surrogates import SURROGATES
from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.policy_gradient.loss import (
    CLIP_KEYS,
    COLUMNS,
    SWITCHES,
    aggregation_of,
    columns_of,
    has_one_update,
    loss_of,
    needs_prev,
    surrogate_name,
    surrogate_of,
)
from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.rollouts.checks import filter_problems
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Problem
from rl_core.data.microbatch import PAIR


def loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Problems of `loss_fn` in a whole config, and of the reference that it compares with.

    Args:
        algorithm: section of the algorithm.
    """
    loss = config.loss_fn
    yield from _reference(config, algorithm)
    yield from _uncorrected(config, algorithm)
    if isinstance(loss, LossConfig) and loss.staleness_decay < 1 and not algorithm.max_staleness:
        yield _problem(
            "staleness_decay",
            "has no effect in a synchronous run, in which every rollout is of the newest weights; set "
            f"{algorithm.section}.async_grpo.enabled=true and max_trajectory_age_steps above 0, or remove this key",
        )
    if not isinstance(loss, LossConfig):
        yield from _custom_loss_problems(config, algorithm)
        return
    if loss.force_on_policy_ratio and not has_one_update(config, algorithm):
        rows = algorithm.rollouts_per_step
        remedy = f"set policy.train_global_batch_size to {rows}" if algorithm.passes_per_step == 1 else "remove it"
        yield _problem("force_on_policy_ratio", f"needs one minibatch and one pass over it a step: {remedy}")
    yield from policy_loss_problems(loss)


def _reference(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find moves of a reference that nothing reads, or that never take place."""
    if algorithm.reference_sync_period and "ref_logprobs" not in columns_of(config, algorithm):
        yield Problem(
            f"{algorithm.section}.reference_sync_period",
            "has no effect: the loss compares with no reference policy; set loss_fn.reference_policy_kl_penalty above "
            "0, or remove this key",
        )
    if algorithm.reference_mixup_alpha != 1 and not algorithm.reference_sync_period:
        yield Problem(
            f"{algorithm.section}.reference_mixup_alpha", "has no effect without reference_sync_period; set it above 0"
        )


def _uncorrected(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Find a loss that takes what older weights sampled for what the policy samples."""
    if not algorithm.max_staleness:
        return
    cause = f"{algorithm.section}.async_grpo lets rollouts be {algorithm.max_staleness} steps old"
    if not isinstance(config.loss_fn, LossConfig):
        if "generation_logprobs" not in columns_of(config, algorithm):
            yield Problem(
                "loss_fn.name",
                f"{cause}, but {config.loss_fn.name} does not read generation_logprobs and cannot correct for that; "
                f"add the column, or set {algorithm.section}.async_grpo.enabled=false",
            )
    elif not config.loss_fn.use_importance_sampling_correction and config.loss_fn.ratio_denominator == "prev":
        yield _problem(
            "use_importance_sampling_correction",
            f"{cause}, for which the loss does not correct; set it to true with truncated_importance_sampling_ratio=2, "
            "or loss_fn.ratio_denominator=generation",
        )


def _custom_loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    name = config.loss_fn.name
    try:
        loss = loss_of(config, algorithm)
        columns, temperature, reads = tuple(loss.columns), loss.temperature, loss.reads
    except (ValueError, TypeError) as error:
        yield Problem("loss_fn", f"{name}: {error}")
        return
    unknown = [column for column in columns if column not in COLUMNS and not (algorithm.splits and column == PAIR)]
    if algorithm.splits and PAIR not in columns:
        yield Problem(
            f"{algorithm.section}.rewritten_history",
            f"split makes several rows of a rollout, and {name} may take each for a rollout; add `{PAIR}` to its "
            "columns, the number of each row's rollout, and count rows with the same number as one, or set this key to "
            "`keep`",
        )
    if unknown:
        yield Problem("loss_fn.name", f"{name} needs {', '.join(unknown)}; a batch has {', '.join(COLUMNS)}")
    if temperature != config.policy.generation.temperature:
        yield Problem(
            "policy.generation.temperature",
            f"{config.policy.generation.temperature} is not the temperature of {name}, which is {temperature}; give "
            "the class a field `temperature`, which is then set to it",
        )
    if any(read.token_filter != config.policy.generation.token_filter for read in reads):
        yield from filter_problems(
            config,
            f"{name} reads logprobs of the distribution over all tokens; give the class a field `token_filter`, which "
            "is then set, and pass it on to its reads",
        )
    if algorithm.seq_logprob_error_threshold is not None:
        yield Problem(
            f"{algorithm.section}.seq_logprob_error_threshold", f"has no effect with the loss {name}; remove this key"
        )


def policy_loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Problems of a `loss_fn` section."""
    yield from _surrogate(loss)
    yield from _aggregation(loss)
    if loss.top_entropy_share is not None and not SURROGATES[surrogate_name(loss)].is_by_token:
        yield _problem(
            "top_entropy_share",
            f"leaves out single tokens, but a term of {surrogate_name(loss)} belongs to its whole sequence; remove it",
        )
    yield from _on_policy(loss)
    yield from _kl(loss)
    if loss.ratio_denominator == "generation":
        yield from _around_generation(loss)
    if loss.use_importance_sampling_correction:
        yield from _importance(loss)
    else:
        yield from _without_importance(loss)


def _surrogate(loss: LossConfig) -> Iterator[Problem]:
    switched = [key for key in SWITCHES if getattr(loss, key)]
    if loss.surrogate.name is not None and switched:
        yield _problem(
            switched[0],
            f"chooses the surrogate {SWITCHES[switched[0]]}, but surrogate.name is "
            f"{loss.surrogate.name}; set one of them only",
        )
    if len(switched) > 1:
        chosen = " and ".join(SWITCHES[key] for key in switched)
        yield _problem(switched[1], f"is set beside {switched[0]}: a loss has one surrogate, not {chosen}; remove one")
    try:
        surrogate = surrogate_of(loss)
    except ValueError as error:
        yield _problem("surrogate", str(error))
        return
    fields = {field.name for field in dataclasses.fields(surrogate)}
    for field, key in CLIP_KEYS.items():
        default = LossConfig.model_fields[key].default
        if field not in fields and getattr(loss, key) != default:
            yield _problem(key, f"has no effect with the surrogate {surrogate.name}; remove it, or set it to {default}")


def _aggregation(loss: LossConfig) -> Iterator[Problem]:
    if loss.aggregation is not None and not loss.token_level_loss:
        yield _problem(
            "token_level_loss",
            f"chooses the aggregation sequence-mean, but aggregation is {loss.aggregation}; set one of them only",
        )
    name, surrogate = aggregation_of(loss).name, SURROGATES[surrogate_name(loss)]
    if name not in surrogate.aggregations:
        allowed = " or ".join(surrogate.aggregations)
        yield _problem(
            "aggregation" if loss.aggregation else "token_level_loss",
            f"{surrogate.name} does not go with the aggregation {name}; set aggregation to {allowed}",
        )
    if loss.aggregation_divisor is not None and not name.endswith("token-sum"):
        yield _problem(
            "aggregation_divisor",
            f"has no effect with the aggregation {name}; use token-sum or sequence-mean-token-sum, or remove it",
        )


def _on_policy(loss: LossConfig) -> Iterator[Problem]:
    if not loss.force_on_policy_ratio:
        return
    name = surrogate_name(loss)
    if name == "cispo":
        yield _problem("force_on_policy_ratio", "a ratio of 1 leaves CISPO nothing to clip; use surrogate=reinforce")
    elif needs_prev(loss):
        what = "importance_sampling_batch_normalize" if loss.importance_sampling_batch_normalize else name
        yield _problem("force_on_policy_ratio", f"spares the pass for prev_logprobs, which {what} needs; remove it")


def _kl(loss: LossConfig) -> Iterator[Problem]:
    if loss.reference_policy_kl_penalty == 0:
        for key in ("reference_policy_kl_unbiased", "use_on_policy_kl_approximation", "use_kl_in_reward"):
            if getattr(loss, key):
                yield _problem(key, "has no effect with reference_policy_kl_penalty=0")
        if loss.adaptive_kl.target is not None:
            yield _problem("adaptive_kl.target", "needs a first weight: set reference_policy_kl_penalty above 0")
        return
    if loss.use_kl_in_reward:
        for key in ("reference_policy_kl_unbiased", "use_on_policy_kl_approximation"):
            if getattr(loss, key):
                yield _problem(key, "corrects a gradient, which KL in the reward does not have; remove it")
        return
    if loss.reference_policy_kl_type == "k1" and not loss.reference_policy_kl_unbiased:
        yield _problem(
            "reference_policy_kl_type",
            "k1 has no gradient in expectation as a term of the loss; set "
            "reference_policy_kl_unbiased=true, use_kl_in_reward=true, or use k2 or k3",
        )
    if loss.reference_policy_kl_type == "k2" and loss.reference_policy_kl_unbiased:
        yield _problem(
            "reference_policy_kl_unbiased",
            "k2 has the exact gradient by itself and an inexact one with this; remove it, or use k1 or k3",
        )


def _importance(loss: LossConfig) -> Iterator[Problem]:
    kind, level = loss.truncated_importance_sampling_type, loss.importance_sampling_level
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    surrogate = SURROGATES[surrogate_name(loss)]
    if low is not None and high is not None and low > high:
        yield _problem(
            "truncated_importance_sampling_ratio_min",
            f"{low} is above truncated_importance_sampling_ratio {high}: no weight would be left; set it lower",
        )
    if kind != "tis" and high is None:
        yield _problem("truncated_importance_sampling_ratio", f"{kind} needs an upper bound")
    if level == "token" and surrogate.level == "sequence":
        yield _problem(
            "importance_sampling_level",
            f"{surrogate.name} has one ratio per sequence, which a weight per token does not correct; use sequence",
        )
    if kind == "seq-mask-tis" and (level or surrogate.level) == "sequence":
        yield _problem(
            "truncated_importance_sampling_type",
            "seq-mask-tis has weights by token, but the weights here are by sequence; use tis or icepop",
        )
    if loss.importance_sampling_batch_normalize and loss.aggregation == "token-sum":
        yield _problem("importance_sampling_batch_normalize", "has nothing to divide by with the aggregation token-sum")
    yield from _rejection(loss)


def _rejection(loss: LossConfig) -> Iterator[Problem]:
    rejection, section = loss.importance_sampling_rejection, "importance_sampling_rejection"
    if rejection.low is not None and rejection.estimator != "k1":
        yield _problem(f"{section}.low", f"{rejection.estimator} is never negative, and small is good; remove it")
    if rejection.low is not None and rejection.high is not None and rejection.low > rejection.high:
        yield _problem(f"{section}.low", f"{rejection.low} is above high, which is {rejection.high}; set it lower")


def _around_generation(loss: LossConfig) -> Iterator[Problem]:
    if surrogate_name(loss) == "reinforce":
        yield _problem("ratio_denominator", "has no effect with the surrogate reinforce, which has no ratio; remove it")
    if loss.use_importance_sampling_correction:
        yield _problem(
            "use_importance_sampling_correction",
            "corrects for the generator's logprobs, which the ratio does with ratio_denominator=generation; set one of "
            "them only",
        )
    if loss.force_on_policy_ratio:
        yield _problem("force_on_policy_ratio", "takes the ratio as 1, which it is not to generation; remove it")


def _without_importance(loss: LossConfig) -> Iterator[Problem]:
    """Everything about weights has no effect without weights."""
    for key in (
        "truncated_importance_sampling_type",
        "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
        "importance_sampling_level",
        "importance_sampling_batch_normalize",
        "importance_sampling_rejection",
    ):
        if getattr(loss, key) != getattr(LossConfig(), key):
            yield _problem(key, "has no effect without use_importance_sampling_correction=true")


def _problem(key: str, message: str) -> Problem:
    return Problem(f"loss_fn.{key}", message)
