"""Validation of the policy on prompts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_algos.evaluation.scores import PromptScore
from rl_algos.evaluation.summary import mean_length, means, means_by_dataset
from rl_algos.rollouts.config import RolloutConfig
from rl_core.generation import Evaluation, RolloutSource, SamplingParams
from rl_core.rollout import Prompt
from rl_core.run import Run


class RolloutValidation(Protocol):
    """A validation of the policy that samples with the newest weights."""

    def __call__(self, rollouts: RolloutSource, run: Run, *, step: int) -> None:
        """Evaluate and record `val/*` under the step."""
        ...


class Validation:
    """Scores the policy on validation prompts and ends the run when a goal is reached.

    Args:
        prompts: all validation prompts; at most `config.max_val_samples` of them are used.
        sampling: how validation completions are drawn.
        config: number of samples and generations, and the goal.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingParams, config: RolloutConfig) -> None:
        self._prompts = list(prompts)[: config.max_val_samples]
        self._sampling = sampling
        self._config = config

    def __call__(self, rollouts: RolloutSource, run: Run, *, step: int) -> None:
        """Evaluate and record `val/*` under the step."""
        with run.phase("validation"):
            evaluation = rollouts.evaluate(
                self._prompts, self._sampling, num_generations=self._config.val_num_generations_per_prompt
            )
        metrics = validation_metrics(evaluation)
        run.record(step, metrics)
        name, goal = self._config.stop_at_validation_metric, self._config.stop_at_validation_threshold
        if name is not None and goal is not None and metrics[f"val/{name}"] >= goal:
            run.stop(f"val/{name} reached {metrics[f'val/{name}']:.4g}, the goal was {goal:.4g}")


def validation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """`val/accuracy` (mean reward) over all prompts, and by dataset if there are several."""
    scores = [PromptScore.of_group(group) for group in evaluation.groups]
    by_dataset = {f"val/{name}/accuracy": mean for name, mean in means_by_dataset(scores).items()}
    return {"val/accuracy": float(means(scores).mean()), "val/mean_length": mean_length(scores), **by_dataset}
