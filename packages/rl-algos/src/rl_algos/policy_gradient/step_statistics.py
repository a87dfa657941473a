"""Columns that need all rows of a step: computed once, on the driver, before the step is cut into minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_algos.rollouts.training.segments import ROLLOUT, to_rows
from rl_core.data.batch import Batch, Column
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup


@dataclass(frozen=True)
class StepData:
    """Data of a whole step that a statistic may be computed from.

    Args:
        step: Number of the step.
        groups: Trained on.
        batch: Batch of the rollouts, with advantages and logprobs.
    """

    step: int
    groups: Sequence[RolloutGroup]
    batch: Batch


Statistic = Callable[[StepData], Column]
"""A column that needs all rows of a step."""


class CovarianceSurrogate(Protocol):
    """A surrogate that treats some tokens of high covariance in a way of their own."""

    def chosen(self, covariance: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """bool `[tokens]`, those tokens among all sampled tokens of a step."""
        ...


def high_covariance(surrogate: CovarianceSurrogate, seed: int) -> Statistic:
    """uint8 `[tokens]`, 1 at the tokens that the surrogate chooses by `(prev - mean prev) (A - mean A)`, means over all
    sampled tokens of the step (arXiv:2505.22617).

    Args:
        surrogate: Surrogate that chooses tokens by covariance: Clip-Cov or KL-Cov.
        seed: Seed of a random choice, together with the number of the step.
    """

    def statistic(data: StepData) -> Column:
        mask = data.batch.ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        prev = data.batch.ragged("prev_logprobs").values[is_sampled].astype(np.float64)
        advantages = data.batch["advantages"]
        by_token = advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, mask.lengths)
        own = by_token[is_sampled].astype(np.float64)
        chosen = np.zeros(len(is_sampled), dtype=np.uint8)
        if len(own):
            covariance = (prev - prev.mean()) * (own - own.mean())
            chosen[is_sampled] = surrogate.chosen(covariance, np.random.default_rng((seed, data.step)))
        return mask.like(chosen)

    return statistic


def high_entropy(share: float) -> Statistic:
    """uint8 `[tokens]`, 1 at the share of all sampled tokens of the step at which the policy's entropy before the
    update is highest (arXiv:2506.01939); tokens that tie with the last of them count too."""

    def statistic(data: StepData) -> Column:
        mask = data.batch.ragged(LOSS_MASK)
        is_sampled = mask.values > 0
        entropy = data.batch.ragged("prev_entropy").values[is_sampled]
        chosen = np.zeros(len(is_sampled), dtype=np.uint8)
        if len(entropy):
            place = len(entropy) - math.ceil(share * len(entropy))
            chosen[is_sampled] = entropy >= np.partition(entropy, place)[place]
        return mask.like(chosen)

    return statistic


def positive_examples(data: StepData) -> Column:
    """uint8 `[rows]`, 1 for rollouts whose environment gave them a reward above 0."""
    # NaN, that of a failed rollout, is not above 0
    positive: np.ndarray = np.concatenate([group.rewards() for group in data.groups]) > 0
    return to_rows(data.batch, positive.astype(np.uint8))


def rollouts_of_rows(data: StepData) -> Column:
    """int64 `[rows]`, the number of each row's rollout."""
    return data.batch.array(ROLLOUT)
