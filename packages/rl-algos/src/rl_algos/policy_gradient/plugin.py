"""Shared parts of the plugins of policy-gradient algorithms: the section of their loss, its checks, and their
policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rl_algos.losses.custom import chosen_type
from rl_algos.policy_gradient.config import CustomLossConfig, LossConfig, ObjectiveRoot
from rl_algos.policy_gradient.loss import (
    COLUMNS,
    columns_of,
    has_one_update,
    loss_section,
    needs_prev,
    policy_loss_of,
    surrogate_section,
)
from rl_algos.rollouts.checks import filter_problems
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import Config, Problem, assemble
from rl_core.data.microbatch import PAIR
from rl_core.model import ModelSpec
from rl_core.model_config import reduced_precision
from rl_core.plugins import ModelNeed


def loss_fn_section(written: Any) -> type[Config]:
    """Return the type of `loss_fn`, with the settings of the loss, or of its surrogate, that is written there."""
    kind = chosen_type("name", written, loss_section)
    if not issubclass(kind, LossConfig):
        return kind
    surrogate = written.get("surrogate") if isinstance(written, Mapping) else None
    part = chosen_type("surrogate.name", surrogate, surrogate_section)
    # The default is the same for every surrogate, so that a config shows the one that is written as changed.
    return assemble("PolicyLoss", {"surrogate": (part, LossConfig().surrogate)}, base=LossConfig)


def policy_need(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> ModelNeed:
    """Return the policy of an algorithm whose policy minimises `loss_fn`: it trains, and keeps its reference if the
    loss compares with it.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
    """
    keeps = algorithm.reads_reference or "ref_logprobs" in columns_of(config, algorithm)
    exact = config.policy.generation.exact
    return ModelNeed("policy", ModelSpec(keeps_reference=keeps, seed=algorithm.seed, exact=exact))


def loss_problems(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Yield problems of `loss_fn` in a whole config, and of its reference policy.

    Args:
        config: Resolved config of the run.
        algorithm: Config section of the algorithm.
    """
    loss, section = config.loss_fn, algorithm.section
    if algorithm.reference_sync_period and not policy_need(config, algorithm).spec.keeps_reference:
        because, remedy = "because the loss does not use a reference policy", "set loss_fn.kl.weight above 0"
        yield Problem.unused(f"{section}.reference_sync_period", because, remedy=f"Remove this key, or {remedy}")
    if algorithm.reference_mixup_alpha != 1 and not algorithm.reference_sync_period:
        remedy = "Remove this key, or set reference_sync_period above 0"
        because = f"with {section}.reference_sync_period=0"
        yield Problem.unused(f"{section}.reference_mixup_alpha", because, remedy=remedy)
    yield from _inexact(config, algorithm)
    yield from _uncorrected(config, algorithm)
    yield from _demonstrations(config, algorithm)
    yield from _surrogates(loss, algorithm)
    if not isinstance(loss, LossConfig):
        yield from _custom_loss_problems(config, algorithm, loss)
        return
    if loss.staleness is not None and not algorithm.max_staleness:
        because = "in a synchronous run, because the newest weights sample every rollout"
        remedy = f"Remove this key, or set {section}.async_grpo.enabled=true and max_trajectory_age_steps above 0"
        yield Problem.unused("loss_fn.staleness", because, remedy=remedy)
    if loss.force_on_policy_ratio and not has_one_update(config, algorithm):
        rows = f"Set policy.train_global_batch_size={algorithm.rollouts_per_step}"
        remedy = rows if algorithm.passes_per_step == 1 else "Remove this key"
        reason = "needs one minibatch and one pass over it per step"
        yield Problem("loss_fn.force_on_policy_ratio", reason, got=True, remedy=remedy)
    if loss.observation_nll_weight:
        reader = "loss_fn.observation_nll_weight learns tokens that were not sampled, which may be outside of these"
        yield from filter_problems(config.policy.generation, reader, remedy="Remove one of the two keys")
        if config.policy.generation.thinking_budget and config.policy.generation.thinking_budget_mode == "close":
            reason = "learns the tokens between sampled ones, among which are those that end thoughts by force"
            remedy = "Set policy.generation.thinking_budget_mode=truncate, or remove one of the two keys"
            yield Problem("loss_fn.observation_nll_weight", reason, got=loss.observation_nll_weight, remedy=remedy)
        if algorithm.turn_limit == 1:
            yield Problem.unused("loss_fn.observation_nll_weight", f"with {section}.max_rollout_turns=1")
    yield from policy_loss_problems(loss)


def _surrogates(loss: LossConfig | CustomLossConfig, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Yield problems of settings of the surrogate that differ by environment."""
    for name, values in algorithm.surrogate_by_environment.items():
        key = f"{algorithm.section}.environments.{name}.surrogate"
        if not isinstance(loss, LossConfig):
            yield Problem.unused(key, f"with the loss {loss.name}, which has no surrogate")
            continue
        surrogate = loss.surrogate
        if unknown := [setting for setting in values if setting not in surrogate.by_row]:
            reason = f"has {unknown[0]}, which is not a number in a token's term of the surrogate {surrogate.name}"
            yield Problem(key, reason, got=dict(values), allowed=", ".join(surrogate.by_row) or "none")
            continue
        try:
            type(surrogate).model_validate(surrogate.model_dump() | dict(values))
        except ValidationError as error:
            wrong = error.errors()[0]
            yield Problem(f"{key}.{wrong['loc'][-1]}", wrong["msg"], got=wrong["input"])


def _demonstrations(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Yield problems of demonstrations with the loss that learns them."""
    shown, key = algorithm.demonstrations, f"{algorithm.section}.demonstrations"
    term = config.loss_fn.demonstrations if isinstance(config.loss_fn, LossConfig) else None
    if not shown.is_on:
        if term is not None:
            remedy = f"Remove this key, or set {key}.share or {key}.dataset"
            yield Problem.unused("loss_fn.demonstrations", f"without {key}", remedy=remedy)
        return
    if term is None:
        if isinstance(config.loss_fn, LossConfig):
            remedy = "Set it to nll, or to shaped for demonstrations that have a reward (share)"
            yield Problem("loss_fn.demonstrations", f"must be set, because {key} has rows to learn", remedy=remedy)
        else:
            reason = f"has no term for demonstrations, but {key} has rows to learn"
            yield Problem("loss_fn.name", reason, got=config.loss_fn.name, remedy=f"Set it to policy, or remove {key}")
        return
    reader = "loss_fn.demonstrations learns tokens that were not sampled, which may be outside of these"
    yield from filter_problems(config.policy.generation, reader, remedy="Remove one of the two keys")
    if term.name == "shaped" and shown.dataset is not None:
        reason = f"needs advantages, but nothing scores the conversations of {key}.dataset"
        yield Problem("loss_fn.demonstrations.name", reason, got=term.name, remedy="Set it to nll")
    importance = config.loss_fn.importance if isinstance(config.loss_fn, LossConfig) else None
    if term.name == "shaped" and importance is not None and importance.batch_normalize:
        reason = "divides the policy term by the weights of sampled tokens, and demonstrations have none"
        remedy = "Remove this key, or set loss_fn.demonstrations=nll"
        yield Problem("loss_fn.importance.batch_normalize", reason, got=True, remedy=remedy)


def _inexact(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Yield the problem of exact logprobs in a run whose rollouts may come from other weights than those that read
    them."""
    if config.policy.generation.exact and algorithm.max_staleness:
        is_async = algorithm.async_grpo.enabled
        key = f"{algorithm.section}.{'async_grpo.enabled' if is_async else 'over_sampling_ratio'}"
        reason = f"needs rollouts of the newest weights, but {key} allows rollouts that are older"
        remedy = f"Set it to false, or {f'{key}=false' if is_async else f'remove {key}'}"
        yield Problem("policy.generation.exact", reason, got=True, remedy=remedy)


def _uncorrected(config: ObjectiveRoot, algorithm: PolicyGradientConfig) -> Iterator[Problem]:
    """Yield the problem of a loss that does not correct for tokens that older weights, or an engine in fewer bits,
    sampled."""
    loss = config.loss_fn
    if algorithm.max_staleness:
        is_async = algorithm.async_grpo.enabled
        key = f"{algorithm.section}.{'async_grpo' if is_async else 'over_sampling_ratio'}"
        cause = f"{key} allows rollouts that are {algorithm.max_staleness} steps old"
        why = "the loss does not correct for their age otherwise"
        otherwise = f"set {key}.enabled=false" if is_async else f"remove {key}"
    else:
        reduced = " and ".join(f"policy.{found}" for found in reduced_precision(config.policy))
        if not reduced or (isinstance(loss, LossConfig) and loss.allow_uncorrected_precision):
            return
        cause = f"the engine and the trainer compute in different precisions ({reduced})"
        why, otherwise = "the loss does not correct for it otherwise", "remove that key"
        if isinstance(loss, LossConfig):
            otherwise += ", or set loss_fn.allow_uncorrected_precision=true to train without a correction"
    if not isinstance(loss, LossConfig):
        if "generation_logprobs" not in columns_of(config, algorithm):
            reason = "does not read generation_logprobs, so it cannot correct for what the engine sampled, but"
            yield Problem("loss_fn.name", f"{reason} {cause}", got=loss.name, remedy=f"Add the column, or {otherwise}")
    elif loss.importance is None and loss.ratio_denominator == "prev":
        remedy = f"Set loss_fn.importance.high=2, or loss_fn.ratio_denominator=generation, or {otherwise}"
        yield Problem("loss_fn.importance", f"must be set, because {cause} and {why}", remedy=remedy)


def _custom_loss_problems(
    config: ObjectiveRoot, algorithm: PolicyGradientConfig, settings: CustomLossConfig
) -> Iterator[Problem]:
    name, generation = settings.name, config.policy.generation
    try:
        loss = policy_loss_of(config, algorithm)
        columns, temperature, reads = tuple(loss.columns), loss.temperature, loss.reads
    except (ValueError, TypeError) as error:
        yield Problem("loss_fn", f"could not create {name}: {error}")
        return
    if algorithm.splits and PAIR not in columns:
        remedy = f"Add `{PAIR}`, the number of each row's rollout, to the columns of the loss and count rows with the "
        remedy += "same number as one"
        reason = f"can make several rows of one rollout, but {name} may count each row as a rollout"
        if algorithm.agent is not None:
            yield Problem(f"{algorithm.section}.agent", reason, remedy=remedy)
        else:
            key, got = f"{algorithm.section}.rewritten_history", algorithm.rewritten_history
            yield Problem(key, reason, got=got, remedy=f"{remedy}, or set this key to `keep`")
    if unknown := [each for each in columns if each not in COLUMNS and not (algorithm.splits and each == PAIR)]:
        reason = f"needs {', '.join(unknown)}, which a batch does not have"
        yield Problem("loss_fn.name", reason, got=name, allowed=f"columns {', '.join(COLUMNS)}")
    if temperature != generation.temperature:
        reason = f"must be equal to the temperature of the loss {name} ({temperature})"
        remedy = "Add a field `temperature` to the class, which is then set from this key"
        yield Problem("policy.generation.temperature", reason, got=generation.temperature, remedy=remedy)
    if any(read.token_filter != algorithm.token_filter(generation) for read in reads):
        reader = f"the loss {name} reads logprobs of the distribution over all tokens"
        remedy = "Add a field `token_filter` to the class, which is then set, and pass it to its reads"
        yield from filter_problems(generation, reader, remedy=remedy, rollouts=algorithm)
    if algorithm.seq_logprob_error_threshold is not None:
        yield Problem.unused(f"{algorithm.section}.seq_logprob_error_threshold", f"with the loss {name}")


def policy_loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Yield problems between the sections of `loss_fn`; each section's type checks its own keys."""
    surrogate, importance, filters = loss.surrogate, loss.importance, loss.filters
    if loss.aggregation.name not in surrogate.aggregations:
        reason, allowed = f"cannot be combined with the surrogate {surrogate.name}", ", ".join(surrogate.aggregations)
        yield Problem("loss_fn.aggregation.name", reason, got=loss.aggregation.name, allowed=allowed)
    by_token = {"top_entropy_share": filters.top_entropy_share, "max_second_moment": filters.max_second_moment}
    for key, setting in by_token.items():
        if setting is not None and not surrogate.is_by_token:
            reason = f"leaves out single tokens, but {surrogate.name} has one term per sequence"
            yield Problem(f"loss_fn.filters.{key}", reason, got=setting, remedy="Remove this key")
    if loss.force_on_policy_ratio and surrogate.name == "cispo":
        reason = "makes the ratio 1, so that cispo has nothing to clip"
        yield Problem("loss_fn.force_on_policy_ratio", reason, got=True, remedy="Set loss_fn.surrogate=reinforce")
    elif loss.force_on_policy_ratio and needs_prev(loss):
        normalizes = importance is not None and importance.batch_normalize
        measures = "filters.max_second_moment" if filters.max_second_moment is not None else surrogate.name
        reader = "importance.batch_normalize" if normalizes else measures
        reason = f"skips the pass that computes prev_logprobs, which {reader} needs"
        yield Problem("loss_fn.force_on_policy_ratio", reason, got=True, remedy="Remove this key")
    if loss.ratio_denominator == "generation":
        yield from _around_generation(loss)
    if importance is None:
        return
    if importance.level == "token" and surrogate.level == "sequence":
        reason = f"does not correct {surrogate.name}, which has one ratio per sequence"
        yield Problem("loss_fn.importance.level", reason, got=importance.level, allowed="sequence")
    if importance.truncation == "seq-mask-tis" and importance.at_level(surrogate.level).level == "sequence":
        reason = "needs one weight per token, but loss_fn.importance.level is sequence"
        yield Problem("loss_fn.importance.truncation", reason, got=importance.truncation, allowed="tis, icepop")
    if importance.batch_normalize and loss.aggregation.name == "token-sum":
        because = "with the aggregation token-sum, because that sum is not divided by a count"
        yield Problem.unused("loss_fn.importance.batch_normalize", because)


def _around_generation(loss: LossConfig) -> Iterator[Problem]:
    """Yield problems of a ratio to the logprobs of the engine."""
    if loss.surrogate.name == "reinforce":
        yield Problem.unused("loss_fn.ratio_denominator", "with the surrogate reinforce, which has no ratio")
    if loss.importance is not None:
        reason = "cannot be combined with loss_fn.ratio_denominator=generation, which corrects for the generator's"
        yield Problem("loss_fn.importance", f"{reason} logprobs too", remedy="Remove one of the two")
    if loss.force_on_policy_ratio:
        reason = "assumes a ratio of 1, which does not hold with loss_fn.ratio_denominator=generation"
        yield Problem("loss_fn.force_on_policy_ratio", reason, got=True, remedy="Remove this key")
