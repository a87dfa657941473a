"""The computation of `rl_algos.losses.importance`: weights of the policy term, and sequences that it leaves out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_algos.losses.importance import ImportanceCorrection, Rejection
from rl_algos.torch.kl import estimate
from rl_algos.torch.sampled import Sampled, bounded


def importance_weights(correction: ImportanceCorrection, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """Weights `[tokens]`, without gradient, and the sequences that have weight 0, bool `[rows]`."""
    low = 0.0 if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    total = sampled.row_sums(sampled.mismatch)
    log_weight = sampled.spread(total) if correction.level == "sequence" else sampled.mismatch
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
    return torch.where(sampled.spread(dropped), 0.0, weight), dropped


def off_policy_sequences(threshold: float, sampled: Sampled) -> Tensor:
    """bool `[rows]`, those with a negative mean advantage whose mean `generation - logp` is above the threshold."""
    distance = sampled.row_means(sampled.generation - sampled.logprobs.detach())
    return (sampled.row_means(sampled.advantages) < 0) & (distance > threshold)


def mismatched_sequences(threshold: float, sampled: Sampled) -> Tensor:
    """bool `[rows]`, those whose mean `exp|prev - generation|` is above the threshold."""
    return sampled.row_means(bounded(sampled.mismatch.abs()).exp()) > threshold


def _rejected(rejection: Rejection, sampled: Sampled) -> Tensor:
    # of KL(generation || prev): the generator drew the tokens
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
