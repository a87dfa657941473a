"""Validation of the policy on prompts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
    """`val/accuracy` (mean reward) over all prompts, and by dataset where there are several."""
    rewards = evaluation.rewards
    lengths = [length for group in evaluation.groups for length in group.rollouts.num_sampled]
    metrics = {"val/accuracy": float(rewards.mean()), "val/mean_length": float(np.mean(lengths))}
    datasets = np.array([group.prompt.dataset for group in evaluation.groups])
    names = np.unique(datasets)
    if len(names) > 1:
        metrics |= {f"val/{name}/accuracy": float(rewards[datasets == name].mean()) for name in names}
    return metrics
