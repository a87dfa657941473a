"""Advantages and returns of a step, from its rewards and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.policy_gradient.advantages import clip_advantages, whitened
from rl_algos.ppo.config import PPOConfig
from rl_algos.ppo.gae import gae, length_adaptive_lambda, reward_at_last
from rl_algos.rollouts.training.rewards import trained_rewards
from rl_algos.rollouts.training.segments import rows_by_rollout, token_rows, whole_rollouts
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import SCORES, VALUES, Model
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup

_EPS = 1e-8


@dataclass(frozen=True)
class Values:
    """The critic's values before the step.

    Args:
        before: float32 `[tokens]`, by rows of the batch, of the state before each token.
        last: float `[rollouts]`, of the state after the last token of one that continues; 0 for one that has ended.
    """

    before: Ragged
    last: np.ndarray


@dataclass(frozen=True)
class Estimates:
    """Results for the sampled tokens, 0 at all others, with a row per rollout.

    Args:
        advantages: float64 `[tokens]`, what the policy learns from.
        returns: float64 `[tokens]`, what the critic learns.
    """

    advantages: Ragged
    returns: Ragged


def values_of(batch: Batch, groups: Sequence[RolloutGroup], critic: Model, config: PPOConfig) -> Values:
    """The critic's values of a batch of all rollouts of the groups."""
    goes_on = np.array([status == "truncated" for group in groups for status in group.rollouts.status])
    if not config.bootstrap_truncated:
        return Values(critic.infer(batch, [VALUES]).ragged(VALUES.name), np.zeros(len(goes_on)))
    # a rollout ends with a token that was sampled, so that the last state is that after the last action
    found = critic.infer(batch, [VALUES, SCORES])
    after_rows = found.array(SCORES.name)
    last_rows = rows_by_rollout(batch).offsets[1:] - 1
    return Values(found.ragged(VALUES.name), np.where(goes_on, after_rows[last_rows], 0.0))


def estimates_of(
    batch: Batch, groups: Sequence[RolloutGroup], values: Values, config: PPOConfig, *, penalties: Ragged | None = None
) -> Estimates:
    """Advantages by GAE with the policy's lambda, and returns `A + V` with the critic's (decoupled GAE of VAPO,
    arXiv:2504.05118). The segments of a rollout follow one another as its turns do.

    Args:
        batch: Batch of all rollouts of the groups.
        groups: Groups of the step, in the order of the batch.
        values: Values of the critic before the step.
        config: Config section of the algorithm, with `gamma` and the lambdas.
        penalties: `[tokens]`, by rows of the batch, what each sampled token takes from the reward; None for nothing.
    """
    mask, before = whole_rollouts(batch.ragged(LOSS_MASK), groups), whole_rollouts(values.before, groups)
    penalties = None if penalties is None else whole_rollouts(penalties, groups)
    rewards = reward_at_last(trained_rewards(groups, config), mask, penalties)

    def advantages(lam: float | np.ndarray) -> Ragged:
        return gae(rewards, before, mask, last_values=values.last, gamma=config.gamma, lam=lam)

    alpha = config.length_adaptive_alpha
    of_policy = advantages(config.gae_lambda if alpha is None else length_adaptive_lambda(mask.sums(), alpha))
    of_critic = advantages(config.gae_lambda if config.critic_gae_lambda is None else config.critic_gae_lambda)
    returns = of_critic.values + np.where(mask.values > 0, before.values, 0.0)
    if config.normalize_advantages:
        of_policy = mask.like(whitened(of_policy.values, mask.values, _EPS))
    clipped = clip_advantages(of_policy, config.advantage_clip_low, config.advantage_clip_high)
    assert isinstance(clipped, Ragged)
    return Estimates(clipped, mask.like(returns))


def with_returns(batch: Batch, values: Values, estimates: Estimates) -> Batch:
    """The batch with what the critic learns, `returns`, and its `values` before the step; float32 `[tokens]`."""
    returns = estimates.returns.like(estimates.returns.values.astype(np.float32))
    return batch.with_columns({"values": values.before, "returns": token_rows(batch, returns)})


def value_metrics(batch: Batch, values: Values, estimates: Estimates) -> dict[str, float]:
    """Means over the sampled tokens of values and returns, and the share of the returns' variance that the values
    explain: `1 - var(R - V) / var(R)`, 0 if the returns are all equal."""
    sampled = batch.ragged(LOSS_MASK).values > 0
    value, target = values.before.values[sampled].astype(np.float64), estimates.returns.values[sampled]
    if not len(value):
        return {}
    variance = float(target.var())
    explained = 1 - float((target - value).var()) / variance if variance else 0.0
    return {
        "critic/value_mean": float(value.mean()),
        "critic/return_mean": float(target.mean()),
        "critic/explained_variance": explained,
    }
