"""Validation: roll out held-out prompts with the current weights."""

from __future__ import annotations

from collections.abc import Sequence

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.metrics import validation_metrics
from rl_core.generation import RolloutSource, SamplingParams
from rl_core.rollout import Prompt
from rl_core.run import Run


class Validation:
    """Scores the policy on validation prompts and ends the run where a goal is reached.

    Args:
        prompts: all validation prompts; at most `config.max_val_samples` of them are used.
        sampling: how validation completions are drawn.
        config: number of samples and generations, and the goal.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingParams, config: GRPOConfig) -> None:
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
