"""Validation of the policy on separate prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_algos.evaluation.estimates import pass_at_k
from rl_algos.evaluation.summary import PromptScore, mean_length, means, means_by_dataset, powers_of_two
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.training.metrics import agent_metrics, opponent_metrics
from rl_core.errors import ConfigError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import Evaluation, RolloutSource
from rl_core.rollouts.rollout import Prompt
from rl_core.run import Run

ACCURACY = "accuracy"
"""Number in an environment's `info`: 1 for a right response and 0 for a wrong one, regardless of the reward."""

PASSES = 1.0
"""Minimum reward of a sample that counts for `val/pass@k`."""


FALLING = ("loss",)
"""Metrics of a validation that reach a goal from above."""


class Validation:
    """Scores the policy on validation prompts and ends the run when a goal is reached.

    Args:
        prompts: All validation prompts; at most `config.max_val_samples` of them are used.
        sampling: How validation completions are drawn.
        config: Number of samples and generations, and the goal.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingParams, config: RolloutConfig) -> None:
        self._prompts = list(prompts)[: config.max_val_samples]
        self._sampling = sampling
        self._config = config

    def __call__(self, rollouts: RolloutSource, run: Run, *, step: int) -> None:
        """Evaluate and record `val/*` under the step."""
        config = self._config
        with run.phase("validation"):
            count = config.val_num_generations_per_prompt
            evaluation = rollouts.evaluate(self._prompts, self._sampling, num_generations=count)
            further = self.further_metrics(evaluation.groups)
        metrics = {**validation_metrics(evaluation), **further}
        run.record(step, metrics)
        run.record_validation(step, evaluation.groups)
        name, goal = config.stop_at_validation_metric, config.stop_at_validation_threshold
        if name is None or goal is None:
            return
        if f"val/{name}" not in metrics:
            key = f"{config.section}.stop_at_validation_metric"
            raise ConfigError(f"{key}: validation did not record val/{name}; it records {', '.join(metrics)}")
        value = metrics[f"val/{name}"]
        if value <= goal if name in FALLING else value >= goal:
            run.stop(f"val/{name} reached {value:.4g}, the goal was {goal:.4g}")

    def further_metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Measure what an algorithm records in addition, by the name of the metric."""
        return {}


def validation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of a validation.

    - `val/reward`, the mean over all samples, and `val/reward/<part>` of each reward by name; 0 for a failed sample.
    - `val/accuracy` over the samples of environments that report one, and by dataset if there are several; likewise
      `val/<dataset>/reward`.
    - `val/agent/<name>/reward` and the like of each agent, if plays have several; `val/opponent/<name>/reward` of an
      opponent, which no other number counts.
    - With several samples of a prompt, each a rollout of one agent, `val/reward_std`, their deviation within a prompt,
      and `val/pass@k`.
    """
    # Opponents may end all plays of a prompt before the policy has a turn.
    groups = [group for group in evaluation.groups if len(group.rollouts)]
    of_opponents = opponent_metrics(evaluation.groups, prefix="val/")
    if not groups:
        return of_opponents
    scores = [PromptScore.of_group(group) for group in groups]
    found = {
        "val/reward": float(means(scores).mean()),
        **_parts(groups),
        "val/mean_length": mean_length(scores),
        **agent_metrics(groups, prefix="val/"),
        **of_opponents,
    }
    found |= {f"val/{name}/reward": mean for name, mean in means_by_dataset(scores).items()}
    found |= _accuracies(groups)
    num_samples = min(len(score.samples) for score in scores)
    if num_samples > 1 and not any(group.rollouts.agent or group.rollouts.play for group in groups):
        rewards = [np.std([sample.reward for sample in score.samples]) for score in scores]
        found["val/reward_std"] = float(np.mean(rewards))
        passed = [(len(score.samples), score.num_passed(PASSES)) for score in scores]
        for k in powers_of_two(num_samples):
            found[f"val/pass@{k}"] = float(np.mean([pass_at_k(n, number, k) for n, number in passed]))
    return found


def _parts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean of each further reward over the samples that have it or failed, which count as 0."""
    rollouts = [group.rollouts for group in groups]
    by_sample = [rewards for each in rollouts for rewards in each.rewards]
    failed = [status == "failed" for each in rollouts for status in each.status]
    found: dict[str, float] = {}
    for name in sorted(set().union(*by_sample) - {"reward"}):
        pairs = zip(by_sample, failed, strict=True)
        counted = [rewards.get(name, 0.0) for rewards, has_failed in pairs if name in rewards or has_failed]
        found[f"val/reward/{name}"] = float(np.mean(counted))
    return found


def _accuracies(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    reporting = {group.prompt.environment for group in groups if any(ACCURACY in info for info in group.rollouts.info)}
    by_dataset: dict[str, list[float]] = {}
    for group in groups:
        if group.prompt.environment in reporting:
            found = by_dataset.setdefault(group.prompt.dataset, [])
            found += [float(info.get(ACCURACY, 0.0)) for info in group.rollouts.info]
    if not by_dataset:
        return {}
    accuracies = {"val/accuracy": float(np.mean([value for found in by_dataset.values() for value in found]))}
    if len({group.prompt.dataset for group in groups}) > 1:
        accuracies |= {f"val/{name}/accuracy": float(np.mean(found)) for name, found in sorted(by_dataset.items())}
    return accuracies
