"""What a step and a validation report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_algos.grpo.advantages import Advantages
from rl_core.generation import Evaluation
from rl_core.metrics import Metric, over_updates
from rl_core.model import Metrics
from rl_core.ragged import Ragged
from rl_core.rollout import RolloutGroup


def training_metrics(updates: Sequence[Metrics]) -> dict[str, Metric]:
    """Metrics of a step's optimizer updates, each combined as it says itself."""
    return {_key(name): metric for name, metric in over_updates(updates).items()}


def rollout_metrics(
    groups: Sequence[RolloutGroup], aside: Sequence[RolloutGroup], advantages: Advantages
) -> dict[str, float]:
    """Rewards, lengths and endings of the rollouts trained on."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    usable = [rollout for rollout in rollouts if rollout.status != "failed"]
    values = advantages.values if isinstance(advantages, Ragged) else advantages
    metrics = {
        "rollout/failed": float(len(rollouts) - len(usable)),
        "rollout/groups_without_signal": float(len(aside) + _num_alike(groups)),
        "advantage/max": float(np.abs(values).max()),
    }
    if not usable:
        return metrics
    lengths = np.array([rollout.num_sampled for rollout in usable])
    rewards = np.array([rollout.reward for rollout in usable])
    metrics |= {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollout/mean_length": float(lengths.mean()),
        "rollout/max_length": float(lengths.max()),
        "rollout/truncated": float(np.mean([rollout.status == "truncated" for rollout in usable])),
        "rollout/turns": float(np.mean([rollout.num_turns for rollout in usable])),
        "generation/num_tokens": float(lengths.sum()),
    }
    return metrics | _named_rewards(usable) | _reported(usable)


def validation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`val/accuracy` (mean reward) over all prompts, and by dataset where there are several."""
    rewards = evaluation.rewards
    lengths = [rollout.num_sampled for group in evaluation.groups for rollout in group.rollouts]
    metrics = {"val/accuracy": float(rewards.mean()), "val/mean_length": float(np.mean(lengths))}
    datasets = np.array([group.prompt.dataset for group in evaluation.groups])
    names = np.unique(datasets)
    if len(names) > 1:
        metrics |= {f"val/{name}/accuracy": float(rewards[datasets == name].mean()) for name in names}
    return metrics


def _num_alike(groups: Sequence[RolloutGroup]) -> int:
    """Groups whose rewards are all equal; those without rewards do not count."""
    rewards = [group.rewards() for group in groups]
    starts = np.cumsum([0] + [len(each) for each in rewards])[:-1]
    joined = np.concatenate(rewards)
    return int((np.fmin.reduceat(joined, starts) == np.fmax.reduceat(joined, starts)).sum())


def _key(name: str) -> str:
    return name if "/" in name else f"train/{name}"


def _named_rewards(rollouts: Sequence) -> dict[str, float]:
    names = {name for rollout in rollouts for name in rollout.rewards if name != "reward"}
    return {f"reward/{name}": float(np.mean([r.rewards.get(name, 0.0) for r in rollouts])) for name in sorted(names)}


def _reported(rollouts: Sequence) -> dict[str, float]:
    """Numbers that the environments reported, averaged over the rollouts that have them."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.info.items():
            values.setdefault(name, []).append(float(value))
    return {f"environment/{name}": float(np.mean(seen)) for name, seen in sorted(values.items())}
