"""The prompts of a run, drawn by weights that follow the configured schedule and the success of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_algos.data.flow import FlowStream
from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import CurriculumConfig
from rl_core.rollouts.group import RolloutGroup


class Mixture:
    """The datasets of a run that has several, in training.

    With a curriculum, a dataset of configured weight w and a share s of successful rollouts is drawn with weight
    `w * max(floor, 4 s (1 - s))`: the variance of success, the signal of algorithms that compare rollouts, relative
    to its largest. s is the mean over the groups of the dataset, and from the `window`-th on its exponential average
    over this number; a dataset without a group yet counts fully.

    Args:
        stream: Stream of the prompts.
        names: Names of its datasets, as prompts have them.
        curriculum: Curriculum that changes the weights; None to keep the configured ones.
    """

    def __init__(
        self, stream: Stream[Any] | FlowStream[Any], names: Sequence[str], curriculum: CurriculumConfig | None
    ) -> None:
        self._stream = stream
        self._curriculum = curriculum
        self._success = dict.fromkeys(names, 0.0)
        self._num_groups = dict.fromkeys(names, 0)

    @property
    def has_curriculum(self) -> bool:
        """True if weights change, so that there is a state to save."""
        return self._curriculum is not None

    def learn(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Take a step's groups into account, and return its metrics."""
        metrics: dict[str, float] = {}
        for name in self._success:
            own = [group.sampled for group in groups if group.prompt.dataset == name]
            metrics[f"dataset/{name}/prompts"] = float(len(own))
            usable = [np.array([status != "failed" for status in group.rollouts.status], dtype=bool) for group in own]
            rewards = [group.rewards()[mask] for group, mask in zip(own, usable, strict=True)]
            if any(map(len, rewards)):
                metrics[f"dataset/{name}/reward"] = float(np.concatenate(rewards).mean())
            if self._curriculum is not None:
                self._count(name, rewards, self._curriculum)
                metrics[f"dataset/{name}/success"] = self._success[name]
        if self._curriculum is None:
            return metrics
        factors = [self._factor(name, self._curriculum) for name in self._success]
        self._stream.weigh([weight * factor for weight, factor in zip(self._stream.weights, factors, strict=True)])
        return metrics | {f"dataset/{name}/weight": each for name, each in zip(self._success, factors, strict=True)}

    def state(self) -> Mapping[str, Any]:
        """Return the success by dataset, as JSON."""
        return {"success": self._success, "num_groups": self._num_groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the current weights are part of the state of the stream."""
        self._success |= {name: state["success"].get(name, 0.0) for name in self._success}
        self._num_groups |= {name: state["num_groups"].get(name, 0) for name in self._num_groups}

    def _count(self, name: str, rewards: Sequence[np.ndarray], curriculum: CurriculumConfig) -> None:
        for group in rewards:
            if not len(group):
                continue
            self._num_groups[name] += 1
            found = float((group >= curriculum.success_reward).mean())
            share = 1 / min(self._num_groups[name], curriculum.window)
            self._success[name] += share * (found - self._success[name])

    def _factor(self, name: str, curriculum: CurriculumConfig) -> float:
        if not self._num_groups[name]:
            return 1.0
        return max(curriculum.floor, 4 * self._success[name] * (1 - self._success[name]))
