"""Rollouts with the rewards of models that judge, as a loop collects them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rl_algos.judges.judged import group_with_rewards
from rl_algos.judges.rubrics import Rubric
from rl_algos.rollouts.driver.scoring_functions import ModelJudge, ScoringFunctions
from rl_algos.rollouts.driver.watches import FailureWatch
from rl_core.data.batch import Batch
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import SAID, RolloutGroup
from rl_core.rollouts.judging import JudgedReward, JudgedRollout
from rl_core.rollouts.pool import Evaluation, RolloutSource
from rl_core.rollouts.rollout import Prompt
from rl_core.weights import WeightUpdate


class ModelJudges:
    """The models of a run that judge rollouts.

    Args:
        judges: Judges by name.
        rewards: Rewards by them, by environment and reported name.
        functions: Functions that ask them; None for none.
    """

    def __init__(
        self,
        judges: Mapping[str, ModelJudge],
        rewards: Mapping[str, Mapping[str, Rubric]],
        functions: ScoringFunctions | None = None,
    ) -> None:
        self._judges = judges
        self._rewards = rewards
        self._functions = functions

    def judged(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return groups with the rewards of all judges, and of the functions that ask them. A judge has all of them at
        once; what it gives to a group does not depend on the others."""
        functions = self._functions
        given: list[list[dict[str, JudgedReward]]] = (
            [[{} for _ in group.rollouts.status] for group in groups]
            if functions is None
            else functions.rewards(groups)
        )
        shown: dict[int, list[JudgedRollout | None]] = {}
        for environment, rewards in self._rewards.items():
            places = [place for place, group in enumerate(groups) if group.prompt.environment == environment]
            if not places:
                continue
            shown |= zip(places, _shown([groups[place] for place in places]), strict=True)
            for name, judge in self._judges.items():
                own = {part: rubric for part, rubric in rewards.items() if rubric.judge == name}
                found = judge.judge(own, [shown[place] for place in places]) if own else ()
                for place, of_group in zip(places, found, strict=False):
                    for rollout, of_rollout in zip(given[place], of_group, strict=True):
                        rollout.update(of_rollout)
        judged = []
        for group, of_group in zip(groups, given, strict=True):
            environment = group.prompt.environment
            weights = {part: rubric.weight for part, rubric in self._rewards.get(environment, {}).items()}
            weights |= {} if functions is None else functions.weights(environment)
            judged.append(group_with_rewards(group, of_group, weights))
        return judged

    def close(self) -> None:
        """End the processes of the functions."""
        if self._functions is not None:
            self._functions.close()

    def usage(self) -> dict[str, float]:
        """Return the metrics of the judges since the last call."""
        return {name: value for judge in self._judges.values() for name, value in judge.usage().items()}


class JudgedSource:
    """A source whose groups have the rewards of models that judge: see `rl_core.rollouts.pool.RolloutSource`.

    The models are asked when a step has its groups, or an evaluation all of its own. Groups that a checkpoint holds
    have not been collected yet, so they are judged when they are.

    Args:
        source: The source.
        judges: The models.
        phase: Phase of the run in which they are asked.
        failures: Watch over the rollouts that they cannot judge.
    """

    def __init__(
        self,
        source: RolloutSource,
        judges: ModelJudges,
        phase: Callable[[str], AbstractContextManager[None]],
        failures: FailureWatch,
    ) -> None:
        self._source = source
        self._judges = judges
        self._phase = phase
        self._failures = failures
        self._collected: dict[int, tuple[RolloutGroup, RolloutGroup]] = {}
        self.state, self.restore = source.state, source.restore

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """Return the next groups, with their rewards.

        Raises:
            RolloutsFailed: If too many of their rollouts failed.
        """
        groups = self._source.collect(num_groups, num_later=num_later)
        judged = self._judged(groups)
        self._collected |= {id(each): (each, group) for each, group in zip(judged, groups, strict=True)}
        return judged

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected since the last `adopt` train nothing, and why."""
        self._source.set_aside([self._collected[id(group)][1] for group in groups], reason)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the source and of the judges."""
        return {**self._source.metrics(), **self._judges.usage()}

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights, and judge them."""
        evaluation = self._source.evaluate(prompts, sampling, num_generations=num_generations)
        return Evaluation(self._judged(evaluation.groups))

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version."""
        self._source.adopt(update)
        self._collected.clear()

    def close(self) -> None:
        """End everything that was started."""
        self._judges.close()
        self._source.close()

    def _judged(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        with self._phase("judging"):
            judged = self._judges.judged(groups)
        pairs = zip(judged, groups, strict=True)
        if any(new.rollouts.status != old.rollouts.status for new, old in pairs):
            self._failures.check(judged)
        return judged


def _shown(groups: Sequence[RolloutGroup]) -> list[list[JudgedRollout | None]]:
    """Return the rollouts of groups as judges see them; None for those that failed."""
    said = Batch.concat([group.columns.only([SAID]) for group in groups]).ragged(SAID)
    found, row = [], 0
    for group in groups:
        shown: list[JudgedRollout | None] = []
        for lengths, status in zip(group.rollouts.row_lengths, group.rollouts.status, strict=True):
            messages: Any = json.loads(said[row].tobytes()) if status != "failed" else None
            prompt = group.prompt
            judged = None if messages is None else JudgedRollout(prompt.messages, tuple(messages), prompt.info)
            shown.append(judged)
            row += len(lengths)
        found.append(shown)
    return found
