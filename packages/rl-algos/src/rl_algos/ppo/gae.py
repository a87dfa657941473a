"""Generalised advantage estimation (GAE, arXiv:1506.02438) on rows of tokens: pure functions on numpy arrays.

The policy acts at the tokens it sampled, those under `loss_mask`. What lies between two turns (observations of the
environment) is part of the step from the last token of one turn to the first of the next: it is skipped, neither
discounted nor valued.
"""

from __future__ import annotations

import numpy as np

from rl_core.data.ragged import Ragged


def gae(
    rewards: Ragged,
    values: Ragged,
    loss_mask: Ragged,
    *,
    last_values: np.ndarray,
    gamma: float,
    lam: float | np.ndarray,
) -> Ragged:
    """`A_t = sum over k of (gamma lambda)^k d_{t+k}` with `d_t = r_t + gamma V_{t+1} - V_t`, t and t + 1 being
    consecutive sampled tokens of a row.

    Args:
        rewards: `[tokens]`, r, at sampled tokens.
        values: `[tokens]`, V, the critic's value of the state before each token.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        last_values: `[rows]`, V after the last sampled token: 0 for a row that has ended.
        gamma: Discount.
        lam: Lambda, of all rows or `[rows]`.

    Returns:
        float64 `[tokens]`, 0 off the mask.
    """
    sampled = np.flatnonzero(loss_mask.values > 0)
    row = np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)[sampled]
    value = values.values[sampled].astype(np.float64)
    is_last = np.append(row[1:] != row[:-1], True)[: len(row)]
    following = np.where(is_last, last_values[row], np.append(value[1:], 0.0)[: len(row)])
    differences = rewards.values[sampled] + gamma * following - value
    advantages = np.zeros(len(loss_mask.values))
    advantages[sampled] = _discounted_sums(differences, row, gamma * np.broadcast_to(lam, len(loss_mask)))
    return loss_mask.like(advantages)


def reward_at_last(rewards: np.ndarray, loss_mask: Ragged, penalties: Ragged | None = None) -> Ragged:
    """float64 `[tokens]`, the reward of each row at its last sampled token, less the penalties of all tokens.

    Args:
        rewards: float `[rows]`; that of a row without sampled tokens counts for nothing.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        penalties: `[tokens]`, what each sampled token takes from the reward; None for nothing.
    """
    by_token = np.zeros(len(loss_mask.values))
    sampled = np.flatnonzero(loss_mask.values > 0)
    if penalties is not None:
        by_token[sampled] = -penalties.values[sampled]
    row = np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)[sampled]
    is_last = np.append(row[1:] != row[:-1], True)[: len(row)]
    by_token[sampled[is_last]] += rewards[row[is_last]]
    return loss_mask.like(by_token)


def length_adaptive_lambda(lengths: np.ndarray, alpha: float) -> np.ndarray:
    """`max(0, 1 - 1 / (alpha l))` for rows of l sampled tokens (VAPO, arXiv:2504.05118): the weights of all differences
    add up to about `alpha l`, a share of the row whatever its length. 0 for rows without any.

    Args:
        lengths: int `[rows]`, sampled tokens.
        alpha: Approximate share of a row's tokens that the weights add up to; above 0.
    """
    lam: np.ndarray = np.maximum(0.0, 1 - 1 / (alpha * np.maximum(lengths, 1)))
    return lam


def _discounted_sums(terms: np.ndarray, row: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """`[terms]`, `sum over k of factor^k x_{t+k}` within each row.

    By doubling: sums over 2n terms are those over n, plus those over the n that follow times factor^n, so that a row of
    a million terms takes twenty passes over the array.

    Args:
        terms: `[terms]`, the terms of all rows, end to end.
        row: int `[terms]`, row of each term, ascending.
        factors: `[rows]`, discount factor of each row.
    """
    sums = terms.copy()
    ends = np.searchsorted(row, row, side="right")
    remaining = ends - np.arange(len(row))
    power, span = factors[row].astype(np.float64), 1
    while np.any(reaches := remaining > span):
        at = np.flatnonzero(reaches)
        sums[at] += power[at] * sums[at + span]
        power, span = power * power, 2 * span
    return sums
