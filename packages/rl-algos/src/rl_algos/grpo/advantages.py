"""Group-relative advantages: pure functions on numpy arrays."""

from __future__ import annotations

import numpy as np


def group_advantages(
    rewards: np.ndarray, groups: np.ndarray, *, normalize: bool = True, leave_one_out: bool = False, eps: float = 1e-6
) -> np.ndarray:
    """Advantage of each rollout within its group (GRPO, arXiv:2402.03300).

    With n rewards r of a group, mean m and sample standard deviation s (n - 1 in the denominator), the advantage is `r
    - m`, or with
    `leave_one_out` (RLOO, arXiv:2402.14740) `r - mean of the others = (r - m) n / (n - 1)`; `normalize` divides it by
    `s + eps`.
    The deviation is always that of the whole group: the others' alone would be 0 beside a single outlier.

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        groups: `[rollouts]`, group id of each.
        normalize, leave_one_out, eps: as above.

    Returns:
        float64 `[rollouts]`; exactly 0 for a group of one or of equal rewards.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = np.flatnonzero((groups == group) & ~np.isnan(rewards))
        values = rewards[members]
        if len(values) < 2 or np.all(values == values[0]):
            continue
        advantage = values - values.mean()
        deviation = np.sqrt(np.square(advantage).sum() / (len(values) - 1))
        if leave_one_out:
            advantage = advantage * (len(values) / (len(values) - 1))
        advantages[members] = advantage / (deviation + eps) if normalize else advantage
    return advantages


def clip_advantages(advantages: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    """Advantages bounded on either side; None leaves a side open."""
    return advantages if low is None and high is None else np.clip(advantages, low, high)
