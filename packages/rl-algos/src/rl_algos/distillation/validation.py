"""Validation of a student on its rollouts of prompts that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_algos.distillation.teachers import RolloutScorer
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.driver.validation import goal_value, validation_metrics
from rl_algos.rollouts.training.batch import build_batch
from rl_core.model import Loss, Model
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.rollouts.source import RolloutSource
from rl_core.run import Run

FALLING = ("loss",)
"""Metrics of a validation that reach a goal from above."""


@dataclass(frozen=True)
class DistillationValidation:
    """Compares the student with its teachers, and ends the run when a goal is reached.

    Args:
        policy: The student.
        teachers: Teachers that it is compared with.
        loss: Loss that is measured.
        prompts: All validation prompts; at most `config.max_val_samples` of them are used.
        sampling: How completions are drawn.
        config: Number of samples and generations, and the goal.
    """

    policy: Model
    teachers: RolloutScorer
    loss: Loss
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    config: RolloutConfig

    def __call__(self, rollouts: RolloutSource, run: Run, *, step: int) -> None:
        """Evaluate and record `val/*` under the step: rewards and lengths, and the loss with its parts."""
        config = self.config
        with run.phase("validation"):
            evaluation = rollouts.evaluate(
                self.prompts[: config.max_val_samples],
                self.sampling,
                num_generations=config.val_num_generations_per_prompt,
            )
            groups = evaluation.groups
            batch = self.teachers.scored(build_batch(groups, config), groups)
            found = {f"val/{name}": metric.result() for name, metric in self.policy.evaluate(batch, self.loss).items()}
        metrics = {**validation_metrics(evaluation), **found}
        run.record(step, metrics)
        run.record_validation(step, evaluation.groups)
        name, goal = config.stop_at_validation_metric, config.stop_at_validation_threshold
        if name is None or goal is None:
            return
        value = goal_value(metrics, name, config)
        if value <= goal if name in FALLING else value >= goal:
            run.stop(f"val/{name} reached {value:.4g}, the goal was {goal:.4g}")
