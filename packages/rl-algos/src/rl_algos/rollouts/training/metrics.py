"""Metrics of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import numpy as np

from rl_algos.rollouts.training.batch import Advantages
from rl_algos.rollouts.training.rewards import varies
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric, over_updates
from rl_core.model import Metrics
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Thinking

PREFIX = "ignored/"
"""Prefix of the entries of `Rollout.info` for fields that an agent has set."""

REFILLED = "refilled"
"""Field in `Rollout.info` of a rollout that began again because its infrastructure had failed: how often it did."""


def ignored_info(fields: Iterable[str]) -> Mapping[str, float]:
    """Return the entries of `Rollout.info` for the fields that a rollout's agent has set."""
    return {f"{PREFIX}{name}": 1.0 for name in sorted(fields)}


def thinking_info(thoughts: Sequence[Thinking]) -> Mapping[str, float]:
    """Return the entries of `Rollout.info` for the thoughts of its turns; none without a thinking budget."""
    if not thoughts:
        return {}
    return {
        "thinking/tokens": float(sum(each.num_tokens for each in thoughts)),
        "thinking/cut": float(any(each.is_cut for each in thoughts)),
    }


def training_metrics(updates: Sequence[Metrics], *, prefix: str = "train") -> dict[str, Metric]:
    """Combine the metrics of a step's optimizer updates, each by its own reduction; return none without updates.

    Args:
        updates: Metrics of each optimizer update of the step.
        prefix: Prefix for names without one.
    """
    if not updates:
        return {}
    combined = over_updates(updates).items()
    return {name if "/" in name else f"{prefix}/{name}": metric for name, metric in combined}


def signal_metrics(groups: Sequence[RolloutGroup], aside: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the number of groups whose rewards are all equal, for an algorithm that compares rollouts of a group.

    Args:
        groups: Groups trained on.
        aside: Groups rolled out and not trained on.
    """
    return {"rollout/groups_without_signal": float(sum(not varies(group) for group in aside) + _num_alike(groups))}


def rollout_metrics(groups: Sequence[RolloutGroup], advantages: Advantages | None = None) -> dict[str, float]:
    """Return rewards, lengths and endings of the rollouts trained on, without demonstrations.

    Args:
        groups: Groups trained on.
        advantages: Advantages of `groups`; None if there are none.
    """
    groups = [group.sampled for group in groups]
    statuses = [status for group in groups for status in group.rollouts.status]
    usable = np.array([status != "failed" for status in statuses])
    infos = [info for group in groups for info in group.rollouts.info]
    metrics = {
        "rollout/failed": float(len(usable) - usable.sum()),
        "rollout/refilled": float(sum(REFILLED in info for info in infos)),
    }
    if advantages is not None:
        values = advantages.values if isinstance(advantages, Ragged) else advantages
        metrics["advantage/max"] = float(np.abs(values).max())
    if not usable.any():
        return metrics
    lengths = np.array([length for group in groups for length in group.rollouts.num_sampled])[usable]
    turns = np.array([number for group in groups for number in group.rollouts.num_turns])[usable]
    rewards = np.concatenate([group.rewards() for group in groups])[usable]
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollout/mean_length": float(lengths.mean()),
        "rollout/max_length": float(lengths.max()),
        "rollout/truncated": statuses.count("truncated") / len(lengths),
        "rollout/turns": float(turns.mean()),
        "generation/num_tokens": float(lengths.sum()),
    }
    if any(group.rollouts.segments for group in groups):
        num_rows = np.array([len(rows) for group in groups for rows in group.rollouts.row_lengths])[usable]
        metrics["rollout/segments"] = float(num_rows.mean())
    named = _means(compress([rewards for group in groups for rewards in group.rollouts.rewards], usable))
    reported = _means(compress(infos, usable))
    reported.pop(REFILLED, None)
    return {
        **metrics,
        **{f"reward/{name}": value for name, value in named.items() if name != "reward"},
        # Environments report numbers; the worker adds fields without effect, thoughts and compactions.
        **{
            f"{'rollout' if name.startswith((PREFIX, 'thinking/', 'compaction/')) else 'environment'}/{name}": value
            for name, value in reported.items()
        },
        **agent_metrics(groups),
        **opponent_metrics(groups),
    }


def agent_metrics(groups: Sequence[RolloutGroup], *, prefix: str = "") -> dict[str, float]:
    """Return the number, mean reward and mean length of the rollouts of each agent that did not fail; none if no agent
    has a name.

    Args:
        groups: Groups of the rollouts.
        prefix: Prefix of the names.
    """
    rewards, lengths = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    for group in groups:
        rollouts = group.rollouts
        rows = zip(rollouts.agent, rollouts.status, group.rewards().tolist(), rollouts.num_sampled, strict=False)
        for agent, status, reward, length in rows:
            if agent and status != "failed":
                rewards[agent].append(reward)
                lengths[agent].append(length)
    found: dict[str, float] = {}
    for agent in sorted(rewards):
        found[f"{prefix}agent/{agent}/rollouts"] = float(len(rewards[agent]))
        found[f"{prefix}agent/{agent}/reward"] = float(np.mean(rewards[agent]))
        found[f"{prefix}agent/{agent}/length"] = float(np.mean(lengths[agent]))
    return found


def opponent_metrics(groups: Sequence[RolloutGroup], *, prefix: str = "") -> dict[str, float]:
    """Return the number, mean reward, mean length and mean weight version of the rollouts of each agent that was an
    opponent; none without opponents.

    Args:
        groups: Groups of the plays.
        prefix: Prefix of the names.
    """
    parts = [group.opponents for group in groups if group.opponents is not None]
    found = {f"{prefix}opponent/{name.removeprefix('agent/')}": value for name, value in agent_metrics(parts).items()}
    versions = defaultdict[str, list[int]](list)
    for part in parts:
        for agent, spans in zip(part.rollouts.agents, part.rollouts.spans, strict=True):
            versions[agent] += [version for version, num_tokens in spans for _ in range(num_tokens)]
    return found | {
        f"{prefix}opponent/{agent}/weight_version": float(np.mean(versions[agent]))
        for agent in sorted(versions)
        if versions[agent]
    }


def _num_alike(groups: Sequence[RolloutGroup]) -> int:
    """Count the groups whose compared rewards are all equal; groups without rewards do not count."""
    several = [group for group in groups if group.rollouts.agent or group.rollouts.peers]
    if several:
        alone = [group for group in groups if not (group.rollouts.agent or group.rollouts.peers)]
        usable = sum(not varies(group) and not np.isnan(group.rewards()).all() for group in several)
        return usable + (_num_alike(alone) if alone else 0)
    rewards = [group.rewards() for group in groups]
    starts = np.cumsum([0] + [len(each) for each in rewards])[:-1]
    joined = np.concatenate(rewards)
    return int((np.fmin.reduceat(joined, starts) == np.fmax.reduceat(joined, starts)).sum())


def _means(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average the values of each name over the rollouts that have it."""
    by_name: dict[str, list[float]] = {}
    for each in values:
        for name, value in each.items():
            by_name.setdefault(name, []).append(float(value))
    return {name: float(np.mean(found)) for name, found in sorted(by_name.items())}
