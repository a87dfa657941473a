"""The computation of `rl_algos.losses.policy.PolicyLoss`, with its importance weights and left-out sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.losses.policy import PolicyLoss, surrogate_column
from rl_algos.losses.terms import Aggregation, Demonstrations
from rl_algos.torch.sampled import Sampled, bounded, estimate, observed, reference_kl, weighed
from rl_algos.torch.surrogates import COMPUTATIONS
from rl_core.model import UNDIVIDED
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute(loss: PolicyLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of the policy loss over one microbatch.

    Args:
        loss: Description of the loss.
        reads: `logprobs` float32 `[tokens]`, with gradient, and `entropy` likewise if the loss reads it.
        rows: Columns of `loss.columns`.
    """
    shows = loss.demonstrations is not None
    sampled = Sampled.of(reads["logprobs"], rows, on_policy=loss.on_policy, has_demonstrations=shows)
    compared = sampled if loss.ratio_denominator == "prev" else replace(sampled, prev=sampled.generation)
    by_row = {setting: rows.per_token(surrogate_column(setting)) for setting in loss.surrogate_by_row}
    surrogate = loss.surrogate.model_copy(update=by_row) if by_row else loss.surrogate
    terms = COMPUTATIONS[type(surrogate)](surrogate, compared)
    policy, without_policy = _corrected(loss, terms.loss, sampled)
    penalties, metrics = _penalties(loss, reads, sampled)
    if loss.staleness is not None:
        # A factor of `decay ** age` at sampled tokens, and 1 at all others.
        age = sampled.select(loss.weight_version - sampled.rows["weight_versions"]).clamp(min=0)
        weights = loss.staleness.decay ** age.to(sampled.logprobs.dtype)
        policy = policy * weights
        metrics["policy/staleness_weight"] = _token_mean(weights, sampled)
    left_out = torch.zeros_like(without_policy)
    if loss.mismatch_threshold is not None:
        left_out = mismatched_sequences(loss.mismatch_threshold, sampled)
    kept = sampled.mask & ~sampled.rows.spread(left_out)

    denominator = loss.aggregation.denominator
    if loss.normalizes_weights:
        objective = {"importance_weights": _aggregated(loss.aggregation, policy, kept, sampled)}
        if penalties is not None:
            objective[denominator] = _aggregated(loss.aggregation, penalties, kept, sampled)
    else:
        per_token = policy if penalties is None else policy + penalties
        objective = {denominator: _aggregated(loss.aggregation, per_token, kept, sampled)}
    if loss.positive_example_nll_weight:
        nll = torch.where(kept & (rows.per_token("positive") > 0), -sampled.logprobs, 0.0).sum()
        objective["positive_tokens"] = loss.positive_example_nll_weight * nll
        metrics["policy/positive_nll"] = MetricSum(nll, "positive_tokens")
    if loss.observation_nll_weight:
        nll = torch.where(observed(rows, sampled.mask), -reads["logprobs"], 0.0).sum()
        objective["observed_tokens"] = loss.observation_nll_weight * nll
        metrics["policy/observation_nll"] = MetricSum(nll.detach(), "observed_tokens")
    if loss.demonstrations is not None:
        shown = Sampled.shown(reads["logprobs"], rows)
        objective = _demonstrated(loss.demonstrations, loss.aggregation, objective, shown)
        metrics["policy/demonstration_nll"] = MetricSum(-shown.logprobs.detach().sum(), "demonstration_tokens")
    metrics |= {
        "policy/ratio": _token_mean(terms.ratio, sampled),
        "policy/behavior_ratio": _token_mean(sampled.behavior_ratio, sampled),
        "policy/clipped": _token_mean(terms.clipped.to(terms.ratio.dtype), sampled),
        "policy/nll": _token_mean(-sampled.logprobs, sampled),
    }
    metrics |= _mismatch_metrics(sampled, without_policy | left_out)
    return LossSums(objective, metrics)


def _corrected(loss: PolicyLoss, policy: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """Return the policy term with importance weights, and the sequences that it leaves out, bool `[rows]`."""
    dropped = torch.zeros_like(sampled.lengths, dtype=torch.bool)
    for column in loss.filters.columns:
        policy = torch.where(sampled.rows[column] > 0, policy, 0.0)
    if loss.filters.off_policy_threshold is not None:
        dropped = off_policy_sequences(loss.filters.off_policy_threshold, sampled)
        policy = torch.where(sampled.rows.spread(dropped), 0.0, policy)
    if loss.importance is not None:
        weight, without_weight = importance_weights(loss.importance, sampled)
        policy, dropped = policy * weight, dropped | without_weight
    return policy, dropped


def _penalties(
    loss: PolicyLoss, reads: Mapping[str, Tensor], sampled: Sampled
) -> tuple[Tensor | None, dict[str, MetricSum]]:
    """Return the term added to the policy term of each token, None for nothing, and its metrics."""
    metrics: dict[str, MetricSum] = {}
    penalties: Tensor | None = None
    if loss.kl is not None:
        kl = reference_kl(loss.kl, sampled.logprobs, sampled.select(sampled.rows["ref_logprobs"]))
        if loss.kl.weight:
            penalties = loss.kl.weight * weighed(loss.kl, kl, sampled)
        metrics["policy/kl"] = _token_mean(kl, sampled)
    if loss.entropy_bonus is not None:
        entropy = sampled.select(reads["entropy"])
        if loss.entropy_bonus.weight:
            bonus = loss.entropy_bonus.weight * entropy
            penalties = -bonus if penalties is None else penalties - bonus
        metrics["policy/entropy"] = _token_mean(entropy, sampled)
    return penalties, metrics


def _demonstrated(
    term: Demonstrations, aggregation: Aggregation, objective: Mapping[str, Tensor], shown: Sampled
) -> dict[str, Tensor]:
    """Return the objective of rollouts and demonstrations together, from the objective of the rollouts."""
    probability = shown.logprobs.exp()
    if term.name == "shaped":
        per_token = -shown.advantages * probability / (probability + term.gamma)
        total, name = _aggregated(aggregation, per_token, shown.mask, shown), aggregation.denominator
        joined = {**objective, name: objective[name] + total}
        # Rollouts and demonstrations are divided by the count of both; a sum that is not divided stays so.
        return {f"all_{key}" if key == name and key != UNDIVIDED else key: value for key, value in joined.items()}
    weights = (probability * (1 - probability)).detach() if term.by_probability else torch.ones_like(probability)
    scaled = {name: (1 - term.weight) * value for name, value in objective.items()}
    return {**scaled, "demonstration_tokens": term.weight * shown.select(-shown.logprobs * weights).sum()}


def _aggregated(aggregation: Aggregation, per_token: Tensor, kept: Tensor, sampled: Sampled) -> Tensor:
    """Return the sum over the microbatch, a scalar. The step divides it by the count `aggregation.denominator`."""
    per_token = torch.where(kept, per_token, 0.0)
    if aggregation.name == "sequence-mean":
        per_token = per_token / sampled.rows.spread(sampled.lengths)
    total = per_token.sum()
    return total if aggregation.divisor == 1.0 else total / aggregation.divisor


def _mismatch_metrics(sampled: Sampled, left_out: Tensor) -> dict[str, MetricSum]:
    """Measure how far trainer and generator disagree on the sampled tokens, and count the sequences left out."""
    size = sampled.mismatch.abs()
    largest = size.max() if len(size) else size.sum()
    difference = bounded(sampled.mismatch)
    has_tokens = sampled.rows.row_sums(sampled.mask.to(size.dtype)) > 0
    return {
        "mismatch/mean": _token_mean(bounded(size).exp(), sampled),
        "mismatch/kl": _token_mean(torch.expm1(difference) - difference, sampled),
        "mismatch/weight": _token_mean(difference.exp(), sampled),
        "mismatch/weight_squared": _token_mean(difference.exp().square(), sampled),
        "mismatch/max": MetricSum(largest, reduction="max"),
        "mismatch/masked_sequences": MetricSum((left_out & has_tokens).to(size.dtype).sum(), reduction="sum"),
    }


def _token_mean(values: Tensor, sampled: Sampled) -> MetricSum:
    return MetricSum(sampled.select(values.detach()).sum(), "tokens")


def importance_weights(correction: ImportanceCorrection, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """Return weights `[tokens]`, without gradient, and the sequences that have weight 0, bool `[rows]`."""
    low = 0.0 if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    total = sampled.row_sums(sampled.mismatch)
    log_weight = sampled.rows.spread(total) if correction.level == "sequence" else sampled.mismatch
    weight = bounded(log_weight).exp()
    dropped = torch.zeros_like(total, dtype=torch.bool)
    if correction.truncation == "tis":
        weight = weight.clamp(low, high)
    elif correction.truncation == "icepop":
        weight = torch.where(_within(weight, low, high), weight, 0.0)
        if correction.level == "sequence":
            dropped = ~_within(bounded(total).exp(), low, high)
    else:
        dropped = ~_within(bounded(total / sampled.lengths).exp(), low, high)
    if correction.rejection is not None:
        dropped = dropped | _rejected(correction.rejection, sampled)
    return torch.where(sampled.rows.spread(dropped), 0.0, weight), dropped


def off_policy_sequences(threshold: float, sampled: Sampled) -> Tensor:
    """Return bool `[rows]`: True for a negative mean advantage and a mean `generation - logp` above the threshold."""
    distance = sampled.row_means(sampled.generation - sampled.logprobs.detach())
    return (sampled.row_means(sampled.advantages) < 0) & (distance > threshold)


def mismatched_sequences(threshold: float, sampled: Sampled) -> Tensor:
    """Return bool `[rows]`: True if the mean `exp|prev - generation|` is above the threshold."""
    return sampled.row_means(bounded(sampled.mismatch.abs()).exp()) > threshold


def _rejected(rejection: Rejection, sampled: Sampled) -> Tensor:
    # The generator drew the tokens, so this estimates KL(generation || prev).
    values = estimate(rejection.estimator, bounded(sampled.mismatch))
    if rejection.statistic == "max":
        lowest = torch.full_like(sampled.lengths, -math.inf)
        of_sampled = torch.where(sampled.mask, values, -math.inf)
        found = lowest.scatter_reduce(0, sampled.rows.row_of_token, of_sampled, "amax")
    else:
        found = sampled.row_sums(values) if rejection.statistic == "sum" else sampled.row_means(values)
    low = -math.inf if rejection.low is None else rejection.low
    high = math.inf if rejection.high is None else rejection.high
    return ~_within(found, low, high)


def _within(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)
