"""The computation of `rl_algos.losses.policy.PolicyLoss`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.aggregation import Aggregation
from rl_algos.losses.policy import PolicyLoss
from rl_algos.losses.staleness import StalenessDecay
from rl_algos.torch.importance import importance_weights, mismatched_sequences, off_policy_sequences
from rl_algos.torch.kl import reference_kl, weighed
from rl_algos.torch.sampled import Sampled, bounded
from rl_algos.torch.surrogates import PolicyTerms, policy_terms
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute(loss: PolicyLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of the policy loss over one microbatch.

    Args:
        loss: What to compute.
        reads: `logprobs` float32 `[tokens]`, with gradient, and `entropy` likewise if the loss reads it.
        rows: Columns that `loss.columns` names.
    """
    sampled = Sampled.of(reads["logprobs"], rows, on_policy=loss.on_policy)
    compared = sampled if loss.ratio_denominator == "prev" else sampled.around_generation()
    terms = policy_terms(loss.surrogate, compared)
    policy, without_policy = _corrected(loss, terms.loss, sampled)
    penalties, metrics = _penalties(loss, reads, sampled)
    if loss.staleness is not None:
        weights = _staleness_weights(loss.staleness, loss.weight_version, sampled)
        policy = policy * weights
        metrics["policy/staleness_weight"] = _token_mean(weights, sampled)
    left_out = torch.zeros_like(without_policy)
    if loss.mismatch_threshold is not None:
        left_out = mismatched_sequences(loss.mismatch_threshold, sampled)
    kept = sampled.mask & ~sampled.spread(left_out)

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
    metrics |= _policy_metrics(terms, sampled) | _mismatch_metrics(sampled, without_policy | left_out)
    return LossSums(objective, metrics)


def _corrected(loss: PolicyLoss, policy: Tensor, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """The policy term with importance weights, and the sequences that it leaves out, bool `[rows]`."""
    dropped = torch.zeros_like(sampled.lengths, dtype=torch.bool)
    if loss.filters.top_entropy_share is not None:
        policy = torch.where(sampled.rows["high_entropy"] > 0, policy, 0.0)
    if loss.filters.off_policy_threshold is not None:
        dropped = off_policy_sequences(loss.filters.off_policy_threshold, sampled)
        policy = torch.where(sampled.spread(dropped), 0.0, policy)
    if loss.importance is not None:
        weight, without_weight = importance_weights(loss.importance, sampled)
        policy, dropped = policy * weight, dropped | without_weight
    return policy, dropped


def _staleness_weights(staleness: StalenessDecay, version: int, sampled: Sampled) -> Tensor:
    """`[tokens]`, `decay ** age` at sampled tokens and 1 at all others."""
    age = sampled.select(version - sampled.rows["weight_versions"]).clamp(min=0)
    return staleness.decay ** age.to(sampled.logprobs.dtype)


def _penalties(
    loss: PolicyLoss, reads: Mapping[str, Tensor], sampled: Sampled
) -> tuple[Tensor | None, dict[str, MetricSum]]:
    """Return the term added to the policy term of each token, None for nothing, and its metrics."""
    metrics: dict[str, MetricSum] = {}
    penalties: Tensor | None = None
    if loss.kl is not None:
        kl = reference_kl(loss.kl, sampled.logprobs, sampled.select(sampled.rows["ref_logprobs"]))
        penalties = loss.kl.weight * weighed(loss.kl, kl, sampled)
        metrics["policy/kl"] = _token_mean(kl, sampled)
    if loss.entropy_bonus is not None:
        entropy = sampled.select(reads["entropy"])
        bonus = loss.entropy_bonus.weight * entropy
        penalties = -bonus if penalties is None else penalties - bonus
        metrics["policy/entropy"] = _token_mean(entropy, sampled)
    return penalties, metrics


def _aggregated(aggregation: Aggregation, per_token: Tensor, kept: Tensor, sampled: Sampled) -> Tensor:
    """The sum over the microbatch, a scalar, of which `aggregation.denominator` is the count."""
    per_token = torch.where(kept, per_token, 0.0)
    if aggregation.name == "sequence-mean":
        per_token = per_token / sampled.spread(sampled.lengths)
    total = per_token.sum()
    return total if aggregation.divisor == 1.0 else total / aggregation.divisor


def _policy_metrics(terms: PolicyTerms, sampled: Sampled) -> dict[str, MetricSum]:
    return {
        "policy/ratio": _token_mean(terms.ratio, sampled),
        "policy/behavior_ratio": _token_mean(sampled.behavior_ratio, sampled),
        "policy/clipped": _token_mean(terms.clipped.to(terms.ratio.dtype), sampled),
        "policy/nll": _token_mean(-sampled.logprobs, sampled),
    }


def _mismatch_metrics(sampled: Sampled, left_out: Tensor) -> dict[str, MetricSum]:
    """How far trainer and generator disagree on the sampled tokens, and how many sequences a filter left out."""
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
