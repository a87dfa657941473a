"""Advantages and returns of a step, from its rewards and the critic's values.

They are estimated by generalised advantage estimation (GAE, arXiv:1506.02438) on rows of tokens. The policy acts at the
tokens that it sampled, under `loss_mask`. The tokens between two turns (observations of the environment) are part of
the step from the last token of one turn to the first token of the next: they are skipped, neither discounted nor
valued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_algos.policy_gradient.advantages import clip_advantages, loss_masks, whitened
from rl_algos.ppo.config import PPOConfig, learning_agents
from rl_algos.rollouts.training.agents import agents_of
from rl_algos.rollouts.training.rewards import trained_rewards
from rl_algos.rollouts.training.segments import rows_by_rollout, token_rows, whole_rollouts
from rl_algos.rollouts.training.turns import TurnColumns, turns_of_rollouts
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import SCORES, VALUES, Model
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup

_EPS = 1e-8


class CriticValues(NamedTuple):
    """The critic's values before the step.

    Args:
        before: float32 `[tokens]`, by rows of the batch, of the state before each token.
        last: float `[rollouts]`, of the state after the last token of one that continues; 0 for one that has ended.
    """

    before: Ragged
    last: np.ndarray


def values_of(batch: Batch, groups: Sequence[RolloutGroup], critic: Model, config: PPOConfig) -> CriticValues:
    """Return the critic's values of a batch of all rollouts of the groups."""
    goes_on = np.array([status == "truncated" for group in groups for status in group.rollouts.status])
    if not config.bootstrap_truncated:
        return CriticValues(critic.infer(batch, [VALUES]).ragged(VALUES.name), np.zeros(len(goes_on)))
    # A rollout ends with a token that was sampled, so its last state follows the last action.
    found = critic.infer(batch, [VALUES, SCORES])
    after_rows = found.array(SCORES.name)
    last_rows = rows_by_rollout(batch).offsets[1:] - 1
    return CriticValues(found.ragged(VALUES.name), np.where(goes_on, after_rows[last_rows], 0.0))


def estimates_of(
    batch: Batch,
    groups: Sequence[RolloutGroup],
    values: CriticValues,
    config: PPOConfig,
    *,
    penalties: Ragged | None = None,
) -> tuple[Ragged, Ragged]:
    """Return advantages by GAE with the policy's lambda, and returns `A + V` with the critic's (decoupled GAE of VAPO,
    arXiv:2504.05118). The segments of a rollout follow one another as its turns do. If plays have several agents, each
    has its own rollout, and advantages are normalised over the rollouts of one agent.

    Args:
        batch: Batch of all rollouts of the groups.
        groups: Groups of the step, in the order of the batch.
        values: Values of the critic before the step.
        config: Config section of the algorithm, with `gamma` and the lambdas.
        penalties: `[tokens]`, by rows of the batch, the part of the reward that each sampled token takes away; None for
            nothing.

    Returns:
        The advantages that the policy learns from, and the returns that the critic learns, with a row per rollout:
        float64 `[tokens]`, 0 at tokens that were not sampled.
    """
    mask, before = whole_rollouts(batch.ragged(LOSS_MASK), groups), whole_rollouts(values.before, groups)
    penalties = None if penalties is None else whole_rollouts(penalties, groups)
    rewards = reward_at_last(trained_rewards(groups, config), mask, penalties)
    if config.rewards_by_turn:
        # Turns are places among all sampled tokens, also of rollouts that do not train.
        rewards = rewards_at_turns(rewards, turns_of_rollouts(groups), loss_masks(groups))

    def advantages(lam: float | np.ndarray) -> Ragged:
        return gae(rewards, before, mask, last_values=values.last, gamma=config.gamma, lam=lam)

    alpha = config.length_adaptive_alpha
    of_policy = advantages(config.gae_lambda if alpha is None else length_adaptive_lambda(mask.sums(), alpha))
    of_critic = advantages(config.gae_lambda if config.critic_gae_lambda is None else config.critic_gae_lambda)
    returns = of_critic.values + np.where(mask.values > 0, before.values, 0.0)
    agents = np.repeat(agents_of(groups), mask.lengths)
    if config.normalize_advantages:
        values_by_token = of_policy.values.copy()
        for agent in np.unique(agents):
            own = agents == agent
            values_by_token[own] = whitened(of_policy.values[own], mask.values[own], _EPS)
        of_policy = mask.like(values_by_token)
    clipped = clip_advantages(of_policy, config.advantage_clip_low, config.advantage_clip_high)
    assert isinstance(clipped, Ragged)
    for agent, settings in learning_agents(config).items():
        clipped = clipped.like(np.where(agents == agent, settings.weight, 1.0) * clipped.values)
    return clipped, mask.like(returns)


def with_returns(batch: Batch, values: CriticValues, returns: Ragged) -> Batch:
    """Return the batch with the critic's targets, `returns`, and its `values` before the step; float32 `[tokens]`."""
    single = returns.like(returns.values.astype(np.float32))
    return batch.with_columns({"values": values.before, "returns": token_rows(batch, single)})


def value_metrics(batch: Batch, values: CriticValues, returns: Ragged) -> dict[str, float]:
    """Return the means of values and returns over the sampled tokens, and the share of the returns' variance that the
    values explain: `1 - var(R - V) / var(R)`, 0 if the returns are all equal."""
    sampled = batch.ragged(LOSS_MASK).values > 0
    value, target = values.before.values[sampled].astype(np.float64), returns.values[sampled]
    if not len(value):
        return {}
    variance = float(target.var())
    explained = 1 - float((target - value).var()) / variance if variance else 0.0
    return {
        "critic/value_mean": float(value.mean()),
        "critic/return_mean": float(target.mean()),
        "critic/explained_variance": explained,
    }


def gae(
    rewards: Ragged,
    values: Ragged,
    loss_mask: Ragged,
    *,
    last_values: np.ndarray,
    gamma: float,
    lam: float | np.ndarray,
) -> Ragged:
    """Return `A_t = sum over k of (gamma lambda)^k d_{t+k}` with `d_t = r_t + gamma V_{t+1} - V_t`, t and t + 1 being
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
    """Return float64 `[tokens]`, the reward of each row at its last sampled token, less the penalties of all tokens.

    Args:
        rewards: float `[rows]`; a row without sampled tokens counts for nothing.
        loss_mask: `[tokens]`, 1 on sampled tokens.
        penalties: `[tokens]`, the part of the reward that each sampled token takes away; None for nothing.
    """
    by_token = np.zeros(len(loss_mask.values))
    sampled = np.flatnonzero(loss_mask.values > 0)
    if penalties is not None:
        by_token[sampled] = -penalties.values[sampled]
    row = np.repeat(np.arange(len(loss_mask)), loss_mask.lengths)[sampled]
    is_last = np.append(row[1:] != row[:-1], True)[: len(row)]
    by_token[sampled[is_last]] += rewards[row[is_last]]
    return loss_mask.like(by_token)


def rewards_at_turns(rewards: Ragged, turns: TurnColumns, loss_mask: Ragged) -> Ragged:
    """Return float64 `[tokens]`, rewards with those of earlier turns at the last sampled tokens of their turns, instead
    of at the last one of the rollout.

    Args:
        rewards: `[tokens]`, the reward of each rollout at its last sampled token.
        turns: Turns of the rollouts.
        loss_mask: `[tokens]`, 1 on sampled tokens.
    """
    sampled, num_sampled = np.flatnonzero(loss_mask.values > 0), turns.lengths.sums().astype(np.int64)
    ends = np.repeat(np.cumsum(num_sampled), turns.lengths.lengths)
    starts = ends - np.repeat(num_sampled, turns.lengths.lengths)
    # A turn without tokens has its reward at the token before it, or at the first one of the rollout.
    lasts = np.maximum(np.cumsum(turns.lengths.values) - 1, starts)
    is_moved = (ends > starts) & np.isfinite(turns.rewards.values)
    by_token = rewards.values.copy()
    for places, sign in ((lasts, 1), (ends - 1, -1)):
        np.add.at(by_token, sampled[places[is_moved]], sign * turns.rewards.values[is_moved])
    return loss_mask.like(by_token)


def length_adaptive_lambda(lengths: np.ndarray, alpha: float) -> np.ndarray:
    """Return `max(0, 1 - 1 / (alpha l))` for rows of l sampled tokens (VAPO, arXiv:2504.05118): the weights of all
    differences add up to about `alpha l`, a share of the row regardless of its length. 0 for rows without any.

    Args:
        lengths: int `[rows]`, sampled tokens.
        alpha: Approximate share of a row's tokens that the weights add up to; above 0.
    """
    lam: np.ndarray = np.maximum(0.0, 1 - 1 / (alpha * np.maximum(lengths, 1)))
    return lam


def _discounted_sums(terms: np.ndarray, row: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return `[terms]`, `sum over k of factor^k x_{t+k}` within each row.

    Sums are doubled: a sum over 2n terms is the sum over n terms, plus the sum over the next n terms times factor^n, so
    that a row of a million terms takes twenty passes over the array.

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
