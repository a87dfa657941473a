"""Advantages by turn: each turn of a rollout is compared by its own reward and the rewards after it.

Notation: r_k is the reward of turn k of a rollout, and its return is `G_k = r_k + d r_(k+1) + d^2 r_(k+2) + ...` with
the discount d. Differences to a mean are taken as by `rl_algos.grpo.advantages.grpo`, within the sets of turns that
each function names: over the sample standard deviation with `normalize`, and 0 in a set of one turn or of equal values.
The estimators return float64 `[tokens]`, the advantage of its turn at every sampled token.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from rl_algos.grpo.advantages import grpo
from rl_core.data.ragged import Ragged

Discount = Annotated[float, Field(ge=0, le=1)]
"""Factor of the rewards of each later turn."""


def turn_returns(
    turn_rewards: Ragged,
    turn_lengths: Ragged,
    loss_mask: Ragged,
    groups: np.ndarray,
    normalize: bool = True,
    *,
    discount: Discount = 1.0,
    eps: float = 1e-6,
) -> Ragged:
    """Return the difference of `G_k` to its mean over the k-th turns of the group (turn-level returns, as in the
    multi-turn PPO and GRPO of arXiv:2505.11821). With the discount 0, a turn is compared by its own reward.

    Args:
        turn_rewards: float64 `[turns]`, r_k, a row per rollout; one NaN for a failed one.
        turn_lengths: int64 `[turns]`, sampled tokens of each turn, likewise.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        groups: `[rollouts]`, group id of each.
        normalize: True to divide by the deviation.
        discount: d, from 0 to 1.
        eps: Added to deviations.
    """
    places = _sets(turn_rewards, groups, _numbers(turn_rewards))
    return _by_token(grpo(_returns(turn_rewards, discount), places, normalize, eps=eps), turn_lengths, loss_mask)


def mt_grpo(
    turn_rewards: Ragged,
    turn_lengths: Ragged,
    loss_mask: Ragged,
    groups: np.ndarray,
    normalize: bool = True,
    *,
    turn_weight: float = 1.0,
    eps: float = 1e-6,
) -> Ragged:
    """Return the advantage of the outcome, which is the reward of the last turn, and for all other turns also the
    advantage of their own reward times `turn_weight` (MT-GRPO, arXiv:2505.11821).

    Outcomes are compared within the group, and the k-th turns with one another unless they are the last of a rollout.
    `turn_weight` is the coefficient of the paper. For the other arguments, see `turn_returns`.
    """
    lasts = turn_rewards.offsets[1:] - 1
    own = turn_rewards.values.copy()
    own[lasts] = np.nan
    places = _sets(turn_rewards, groups, _numbers(turn_rewards))
    found = np.repeat(grpo(turn_rewards.values[lasts], groups, normalize, eps=eps), turn_rewards.lengths)
    return _by_token(found + turn_weight * grpo(own, places, normalize, eps=eps), turn_lengths, loss_mask)


def gigpo(
    rewards: np.ndarray,
    turn_rewards: Ragged,
    turn_lengths: Ragged,
    turn_states: Ragged,
    loss_mask: Ragged,
    groups: np.ndarray,
    normalize: bool = True,
    *,
    discount: Discount = 0.95,
    turn_weight: float = 1.0,
    eps: float = 1e-6,
) -> Ragged:
    """Return the advantage of the rollout's reward, plus `turn_weight` times the difference of `G_k` to its mean over
    the turns of the group that were taken in the same state (GiGPO, arXiv:2505.10978).

    A state is what the environment showed before the turn, so it is compared between turns of any number and also
    within a rollout that comes back to it. The first turns of a group share theirs. `rewards` are float `[rollouts]`,
    NaN for failed rollouts, and `turn_states` int64 `[turns]`, equal for equal states. For the other arguments, see
    `turn_returns`.
    """
    same = _sets(turn_rewards, groups, turn_states.values)
    in_state = grpo(_returns(turn_rewards, discount), same, normalize, eps=eps)
    of_rollout = np.repeat(grpo(rewards, groups, normalize, eps=eps), turn_rewards.lengths)
    return _by_token(of_rollout + turn_weight * in_state, turn_lengths, loss_mask)


def _returns(turn_rewards: Ragged, discount: float) -> np.ndarray:
    """Return float64 `[turns]`, the discounted sum of the rewards from each turn on."""
    found = turn_rewards.values.copy()
    lasts = set((turn_rewards.offsets[1:] - 1).tolist())
    for turn in reversed(range(len(found) - 1)):
        if turn not in lasts:
            found[turn] += discount * found[turn + 1]
    return found


def _numbers(turns: Ragged) -> np.ndarray:
    """Return int64 `[turns]`, the number of each turn in its rollout, from 0."""
    return np.arange(len(turns.values)) - np.repeat(turns.offsets[:-1], turns.lengths)


def _sets(turns: Ragged, groups: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return int64 `[turns]`, the same number for turns of one group with one key."""
    pairs = np.stack([np.repeat(groups, turns.lengths), keys], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def _by_token(advantages: np.ndarray, turn_lengths: Ragged, loss_mask: Ragged) -> Ragged:
    """Return the advantage of each turn at its sampled tokens, 0 elsewhere."""
    values = np.zeros(len(loss_mask.values))
    values[loss_mask.values > 0] = np.repeat(advantages, turn_lengths.values)
    return loss_mask.like(values)
