"""Operations on the advantages of every estimator: by rollout, clipped, whitened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_algos.rollouts.training.batch import Advantages
from rl_algos.rollouts.training.segments import whole_rollouts
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup


def loss_masks(groups: Sequence[RolloutGroup]) -> Ragged:
    """Return uint8 `[tokens]`, a row per rollout."""
    return whole_rollouts(Ragged.concat([group.columns.ragged(LOSS_MASK) for group in groups]), groups)


def by_rollout(advantages: Advantages, groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return `[rollouts]`: advantages of tokens as the mean over each rollout's sampled tokens, 0 without any."""
    if not isinstance(advantages, Ragged):
        return advantages
    mask = loss_masks(groups)
    sums = mask.like(np.where(mask.values > 0, advantages.values, 0.0)).sums()
    means: np.ndarray = sums / np.maximum(mask.sums(), 1)
    return means


def clip_advantages(advantages: Advantages, low: float | None, high: float | None) -> Advantages:
    """Bound advantages on either side; None leaves a side open."""
    if low is None and high is None:
        return advantages
    if isinstance(advantages, Ragged):
        return advantages.like(np.clip(advantages.values, low, high))
    return np.clip(advantages, low, high)


def whitened(values: np.ndarray, counts: np.ndarray, eps: float) -> np.ndarray:
    """Return values less their mean, over their deviation, each counted several times; 0 for a count of 0, and for all
    if the values are equal.

    Args:
        values: float `[n]`.
        counts: `[n]`, number of times that each value counts; not negative.
        eps: Added to the deviation.
    """
    counted = counts > 0
    whitened = np.zeros(len(values))
    if not counted.any() or np.ptp(values[counted]) == 0:
        return whitened
    weights = counts[counted] / counts[counted].sum(dtype=np.float64)
    centred = values[counted] - (weights * values[counted]).sum()
    whitened[counted] = centred / (np.sqrt((weights * centred**2).sum()) + eps)
    return whitened
