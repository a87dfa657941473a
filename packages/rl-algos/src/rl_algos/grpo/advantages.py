"""From the rewards of a step to its advantages: pure functions on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl_algos.grpo.config import RewardScalingConfig, RewardShapingConfig
from rl_core.ragged import Ragged

Advantages = np.ndarray | Ragged
"""float64, `[rollouts]` or token-aligned `[tokens]`."""


def grpo(rewards: np.ndarray, groups: np.ndarray, normalize: bool = True, *, eps: float = 1e-6) -> np.ndarray:
    """Difference to the group's mean (GRPO, arXiv:2402.03300).

    With the mean m and the sample standard deviation s (n - 1 in the denominator) of the n rewards of a group, the
    advantage of reward r is `(r - m) / (s + eps)`; without `normalize`, `r - m` (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        groups: `[rollouts]`, group id of each.
        normalize: whether to divide by the deviation.
        eps: added to the deviation.

    Returns:
        float64 `[rollouts]`; exactly 0 for a group of one or of equal rewards.
    """
    return _by_group(rewards, groups, lambda centred: _scaled(centred, centred, normalize, eps))


def rloo(rewards: np.ndarray, groups: np.ndarray, normalize: bool = True, *, eps: float = 1e-6) -> np.ndarray:
    """Difference to the mean of the others in the group (RLOO, arXiv:2402.14740).

    In the terms of `grpo`, the advantage is `(r - m) n / (n - 1)`, which is r minus the mean of the other n - 1;
    `normalize` divides it by `s + eps`. The deviation is that of the whole group: the others' alone would be 0 beside a
    single outlier.

    Args:
        rewards, groups, normalize, eps: as of `grpo`.

    Returns:
        As `grpo`.
    """

    def advantage(centred: np.ndarray) -> np.ndarray:
        return _scaled(centred * (len(centred) / (len(centred) - 1)), centred, normalize, eps)

    return _by_group(rewards, groups, advantage)


def clip_advantages(advantages: Advantages, low: float | None, high: float | None) -> Advantages:
    """Advantages bounded on either side; None leaves a side open."""
    if low is None and high is None:
        return advantages
    if isinstance(advantages, Ragged):
        return advantages.like(np.clip(advantages.values, low, high))
    return np.clip(advantages, low, high)


def scale_rewards(rewards: np.ndarray, scaling: RewardScalingConfig) -> np.ndarray:
    """Rewards mapped linearly from the source range to the target range, clamped at its ends; NaN stays NaN."""
    if not scaling.enabled:
        return rewards
    share = (rewards - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + np.clip(share, 0.0, 1.0) * (scaling.target_max - scaling.target_min)


def shape_rewards(rewards: np.ndarray, num_sampled: np.ndarray, shaping: RewardShapingConfig) -> np.ndarray:
    """Rewards lowered for length: a penalty that grows linearly over the buffer before the limit (DAPO,
    arXiv:2503.14476).

    Args:
        rewards: float `[rollouts]`.
        num_sampled: `[rollouts]`, sampled tokens of each.
        shaping: limit, buffer and penalty.
    """
    if not shaping.enabled:
        return rewards
    start = shaping.max_response_length - shaping.overlong_buffer_length
    share = np.clip((num_sampled - start) / shaping.overlong_buffer_length, 0.0, 1.0)
    return rewards - shaping.overlong_buffer_penalty * share


def _by_group(rewards: np.ndarray, groups: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`advantage` of the centred rewards of every group with rewards that differ; 0 for all other rollouts."""
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(rewards)
    usable = np.flatnonzero(~np.isnan(rewards))
    usable = usable[np.argsort(groups[usable], kind="stable")]
    for members in np.split(usable, np.flatnonzero(np.diff(groups[usable])) + 1):
        values = rewards[members]
        if len(values) >= 2 and np.any(values != values[0]):
            advantages[members] = advantage(values - values.mean())
    return advantages


def _scaled(advantage: np.ndarray, centred: np.ndarray, normalize: bool, eps: float) -> np.ndarray:
    """An advantage over the sample standard deviation of its group, if it is to be normalized."""
    if not normalize:
        return advantage
    deviation = np.sqrt(np.square(centred).sum() / (len(centred) - 1))
    return advantage / (deviation + eps)
