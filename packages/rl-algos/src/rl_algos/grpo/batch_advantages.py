"""Advantages normalised over the whole step: pure functions on numpy arrays.

Their means and deviations are over all rollouts of the step, taken once on the driver: how a step is cut into
minibatches, microbatches and shards changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_algos.grpo.advantages import drgrpo, grpo
from rl_algos.policy_gradient.advantages import whitened
from rl_algos.rollouts.training.batch import Advantages
from rl_core.data.ragged import Ragged


def reinforce_plus_plus(
    rewards: np.ndarray, lengths: np.ndarray, loss_mask: Ragged, penalties: Ragged | None, *, eps: float = 1e-8
) -> Advantages:
    """`(A - mean A) / (std A + eps)` with `A_t = r - sum of the KL penalties from token t on` (REINFORCE++,
    arXiv:2501.03262), mean and deviation over all sampled tokens of the step.

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        lengths: int `[rollouts]`, sampled tokens.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        penalties: `[tokens]`, weighted KL penalty of each sampled token, 0 elsewhere; None without KL in the reward.
        eps: Added to the deviation.

    Returns:
        float64 `[tokens]`, or `[rollouts]` without KL in the reward.
    """
    if penalties is None:
        return whitened(rewards, np.where(np.isnan(rewards), 0, lengths), eps)
    to_go = penalties.like(np.concatenate([row[::-1].cumsum()[::-1] for row in penalties] or [np.zeros(0)]))
    values = np.repeat(rewards, loss_mask.lengths) - to_go.values
    return loss_mask.like(whitened(values, np.where(np.isnan(values), 0, loss_mask.values), eps))


def reinforce_plus_plus_baseline(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, eps: float = 1e-8
) -> np.ndarray:
    """`(A - mean A) / (std A + eps)` with `A = r - m`, m the mean of the group (REINFORCE++-baseline,
    arXiv:2501.03262), mean and deviation over all sampled tokens of the step.

    Args:
        rewards: float `[rollouts]`; NaN marks a failed rollout, which counts for nothing and gets 0.
        groups: `[rollouts]`, group id of each.
        lengths: int `[rollouts]`, number of sampled tokens.
        eps: Added to the deviation.

    Returns:
        float64 `[rollouts]`.
    """
    return whitened(drgrpo(rewards, groups), np.where(np.isnan(rewards), 0, lengths), eps)


def gdpo(
    rewards_by_name: Mapping[str, np.ndarray],
    groups: np.ndarray,
    *,
    weights: dict[str, float] | None = None,
    eps: float = 1e-6,
) -> np.ndarray:
    """Several rewards, each normalised in its group before they are added up (GDPO, arXiv:2601.05242).

    `A = sum_k weight_k (r_k - m_k) / (s_k + eps)`, then `(A - mean A) / (std A + eps)` over all rollouts of the step. A
    reward that varies little counts as much as one that varies a lot, and combinations of rewards with the same
    sum are told apart.

    Args:
        rewards_by_name: float `[rollouts]` by name, as the environment gave them, except `reward`; NaN for failed
            rollouts.
        groups: `[rollouts]`, group id of each.
        weights: Weights of the rewards by name; those without one are left out. None takes all, with the weight 1.
        eps: Added to deviations.

    Returns:
        float64 `[rollouts]`.
    """
    chosen = dict.fromkeys(rewards_by_name, 1.0) if weights is None else weights
    missing = sorted(set(chosen) - set(rewards_by_name))
    if missing or not chosen:
        found = ", ".join(rewards_by_name) or "none"
        raise ValueError(
            f"gdpo needs rewards by name{': no ' + ', '.join(missing) if missing else ''}; in addition to `reward`, "
            f"the environments returned {found}. Return a mapping from the environment, such as "
            '{"correct": 1.0, "format": 0.5}'
        )
    named = [weight * grpo(rewards_by_name[name], groups, eps=eps) for name, weight in chosen.items()]
    failed = np.isnan(rewards_by_name[next(iter(chosen))])
    return whitened(np.sum(named, axis=0), ~failed, eps)
