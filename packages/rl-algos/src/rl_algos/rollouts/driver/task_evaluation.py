"""The evaluation tasks of a run that trains: scored with its newest weights, as `rl eval` scores them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.evaluation.summary import PromptScore, Scoring, mean_length, values_by_name
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.pool import RolloutSource, RolloutTask
from rl_core.rollouts.rollout import Prompt
from rl_core.run import Run


@dataclass(frozen=True)
class EvaluationTask:
    """Prompts that are scored together.

    Args:
        name: Unique in the evaluation.
        groups: The rollouts of each prompt.
        refused: Prompts that leave no room for a completion, each with the reason; they score 0.
        num_samples: Samples of each prompt.
    """

    name: str
    groups: Sequence[RolloutTask]
    refused: Sequence[tuple[Prompt, str]] = ()
    num_samples: int = 1


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that an evaluation rolls out, and how it is scored.

    Args:
        tasks: Tasks in order.
        needs: Requirements of the rollout workers.
        scoring: The estimates to make.
    """

    tasks: Sequence[EvaluationTask]
    needs: RolloutNeeds
    scoring: Scoring = field(default_factory=Scoring)


class TaskEvaluation:
    """Scores the policy on the tasks of `eval`, with the prompts, sampling, seeds and estimates of `rl eval`.

    Args:
        plan: Plan of the tasks. It has the seeds of the run, so that the run's source gives the same rollouts.
        settings: How often.
    """

    def __init__(self, plan: EvaluationPlan, settings: EvaluationConfig) -> None:
        self._plan = plan
        self._settings = settings

    def is_due(self, run: Run, step: int) -> bool:
        """Return whether the tasks are scored after this step; step 0 is the start of the run."""
        if step == 0:
            return self._settings.at_start
        return run.due(self._settings.period, step, at_end=self._settings.at_end)

    def __call__(self, rollouts: RolloutSource, run: Run, *, step: int) -> None:
        """Score every task and record `eval/<task>/*` under the step."""
        with run.phase("evaluation"):
            found = [(task, self._scores(task, rollouts)) for task in self._plan.tasks]
        for task, scores in found:
            statuses = [sample.status for score in scores for sample in score.samples]
            estimates = values_by_name(scores, self._plan.scoring)
            metrics = {name: float(values.mean()) for name, values in estimates.items()}
            counts = {"mean_length": mean_length(scores), "num_failed": float(statuses.count("failed"))}
            run.record(step, {f"eval/{task.name}/{name}": value for name, value in {**metrics, **counts}.items()})

    def _scores(self, task: EvaluationTask, rollouts: RolloutSource) -> list[PromptScore]:
        refused = [PromptScore.refused(p.id, p.dataset, reason, task.num_samples) for p, reason in task.refused]
        if not task.groups:
            return refused
        prompts = [group.prompt for group in task.groups]
        evaluation = rollouts.evaluate(prompts, task.groups[0].sampling, num_generations=task.num_samples)
        # Opponents may end all plays of a prompt before the policy has a turn.
        played = [group for group in evaluation.groups if len(group.rollouts)]
        return [*map(self._score, played), *refused]

    def _score(self, group: RolloutGroup) -> PromptScore:
        if all(k == 1 for k in self._plan.scoring.k):
            return PromptScore.of_group(group)
        # cons@k needs the answers, which only the records hold.
        records = group.records.ragged(RECORD)
        return PromptScore.of_records([json.loads(record.tobytes()) for record in records])
