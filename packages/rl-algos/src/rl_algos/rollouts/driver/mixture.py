"""The prompts of a run, drawn by weights that follow the configured schedule and the success of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_algos.data.flow import FlowStream
from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import CurriculumConfig
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt

PRIOR = 0.25
"""Counts of successes and of failures of a prompt before its first result."""


class Mixture:
    """The prompts of a run in training: which datasets and which prompts of them are drawn, and how often.

    The datasets are drawn by their configured weights at the step. A curriculum multiplies the weights of datasets, or
    of the prompts of each dataset, by `max(floor, 4 s (1 - s))` for a success rate s: the variance of success, the
    signal of algorithms that compare rollouts, relative to its largest. A dataset or prompt without a result counts
    fully.

    - By dataset, s is the mean over the groups of the dataset, and from the `window`-th on its exponential average over
      this number.
    - By prompt, `s (1 - s)` is its mean under the posterior of s, a Beta distribution with the prior `Beta(1/4, 1/4)`.
      The counts of successes and failures halve in every `half_life` epochs of trained prompts, because the policy
      changes.

    Draws depend only on the results of the steps before the one in which they are made. Asynchronous runs draw the
    prompts of up to `max_staleness` later steps as well.

    Args:
        stream: Stream of the prompts.
        names: Names of its datasets, as prompts have them.
        curriculum: Curriculum that changes the weights; None to keep the configured ones.
    """

    def __init__(
        self, stream: Stream[Prompt] | FlowStream[Prompt], names: Sequence[str], curriculum: CurriculumConfig | None
    ) -> None:
        self.stream = stream
        self._curriculum = curriculum
        self._names = tuple(names)
        self._success = dict.fromkeys(names, 0.0)
        self._num_groups = dict.fromkeys(names, 0)
        # Successful rollouts and all rollouts of each prompt, by dataset, with the discount of the older ones.
        self._passed: list[np.ndarray] = []
        self._tried: list[np.ndarray] = []
        if curriculum is not None and curriculum.by == "prompt":
            assert isinstance(stream, Stream), "prompts that are streamed have no weights"
            stream.choose_items(lambda prompt: prompt.id)
            self._passed = [np.zeros(len(prompts)) for prompts in stream.datasets]
            self._tried = [np.zeros(len(prompts)) for prompts in stream.datasets]

    @property
    def has_curriculum(self) -> bool:
        """True if weights follow the success, so that there is a state to save."""
        return self._curriculum is not None

    def learn(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Take a step's groups into account, and return its metrics."""
        metrics: dict[str, float] = {}
        usable: list[tuple[RolloutGroup, np.ndarray]] = []
        for group in (each.sampled for each in groups):
            is_usable = np.array([status != "failed" for status in group.rollouts.status], dtype=bool)
            if is_usable.any():
                usable.append((group, group.rewards()[is_usable]))
        for name in self._names:
            rewards = [each for group, each in usable if group.prompt.dataset == name]
            metrics[f"dataset/{name}/prompts"] = float(sum(group.prompt.dataset == name for group in groups))
            if rewards:
                metrics[f"dataset/{name}/reward"] = float(np.concatenate(rewards).mean())
        if self._curriculum is None:
            return metrics
        if self._curriculum.by == "prompt":
            return metrics | self._weigh_prompts(usable, len(groups), self._curriculum)
        return metrics | self._weigh_datasets(usable, self._curriculum)

    def state(self) -> Mapping[str, Any]:
        """Return the success by dataset and by prompt, as plain data."""
        by_prompt = {"passed": [each.copy() for each in self._passed], "tried": [each.copy() for each in self._tried]}
        return {"success": self._success, "num_groups": self._num_groups, **(by_prompt if self._passed else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the current weights are part of the state of the stream."""
        self._success |= {name: state["success"].get(name, 0.0) for name in self._success}
        self._num_groups |= {name: state["num_groups"].get(name, 0) for name in self._num_groups}
        # A branch of a run may begin to weigh prompts.
        if self._passed and "passed" in state:
            self._passed = [np.array(each) for each in state["passed"]]
            self._tried = [np.array(each) for each in state["tried"]]

    def _weigh_datasets(
        self, usable: Sequence[tuple[RolloutGroup, np.ndarray]], curriculum: CurriculumConfig
    ) -> dict[str, float]:
        for group, rewards in usable:
            name = group.prompt.dataset
            self._num_groups[name] += 1
            share = 1 / min(self._num_groups[name], curriculum.window)
            self._success[name] += share * (float((rewards >= curriculum.success_reward).mean()) - self._success[name])
        factors = {
            name: max(curriculum.floor, 4 * success * (1 - success)) if self._num_groups[name] else 1.0
            for name, success in self._success.items()
        }
        self.stream.weigh(list(factors.values()))
        success = {f"dataset/{name}/success": each for name, each in self._success.items()}
        return success | {f"dataset/{name}/weight": each for name, each in factors.items()}

    def _weigh_prompts(
        self, usable: Sequence[tuple[RolloutGroup, np.ndarray]], num_groups: int, curriculum: CurriculumConfig
    ) -> dict[str, float]:
        assert isinstance(self.stream, Stream)
        kept = 0.5 ** (num_groups / (curriculum.half_life * self.stream.num_items))
        for counts in (*self._passed, *self._tried):
            counts *= kept
        for group, rewards in usable:
            which, position = self.stream.place_of(group.prompt.id)
            self._passed[which][position] += (rewards >= curriculum.success_reward).sum()
            self._tried[which][position] += len(rewards)
        metrics: dict[str, float] = {}
        for which, (name, passed, tried) in enumerate(zip(self._names, self._passed, self._tried, strict=True)):
            a, b, is_tried = passed + PRIOR, tried - passed + PRIOR, tried > 0
            weights = np.maximum(curriculum.floor, 4 * a * b / ((a + b) * (a + b + 1)))
            weights[~is_tried] = 1.0
            self.stream.weigh_items(which, weights)
            metrics[f"dataset/{name}/weight"] = float(weights.mean())
            metrics[f"dataset/{name}/unseen"] = float(1 - is_tried.mean())
            if is_tried.any():
                metrics[f"dataset/{name}/success"] = float((a / (a + b))[is_tried].mean())
        return metrics
