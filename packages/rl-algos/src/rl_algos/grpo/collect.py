"""The groups that a step trains on, and those that a validation scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.metrics import validation_metrics
from rl_algos.grpo.rewards import varies
from rl_core.errors import DataError
from rl_core.generation import RolloutSource, SamplingParams
from rl_core.rollout import Prompt, RolloutGroup
from rl_core.run import Run


def collect_groups(rollouts: RolloutSource, config: GRPOConfig) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """The groups of one step, and those that dynamic sampling set aside (without signal, or beyond those wanted); both
    empty or short when the data ends.

    Raises:
        DataError: if `dynamic_sampling_max_gen_batches` rounds did not find enough groups whose rewards differ.
    """
    if not config.use_dynamic_sampling:
        return rollouts.collect(config.num_prompts_per_step), []
    kept: list[RolloutGroup] = []
    aside: list[RolloutGroup] = []
    for _ in range(config.dynamic_sampling_max_gen_batches):
        drawn = math.ceil((config.num_prompts_per_step - len(kept)) * config.batch_multiplier)
        groups = rollouts.collect(drawn)
        for group in groups:
            is_wanted = len(kept) < config.num_prompts_per_step and varies(group)
            (kept if is_wanted else aside).append(group)
        if len(kept) == config.num_prompts_per_step or len(groups) < drawn:
            return kept, aside
    raise DataError(
        f"dynamic sampling found {len(kept)} of {config.num_prompts_per_step} groups with differing rewards in "
        f"{config.dynamic_sampling_max_gen_batches} rounds; raise grpo.dynamic_sampling_max_gen_batches or choose "
        "prompts the policy sometimes solves"
    )


def greedy_groups(
    rollouts: RolloutSource, groups: Sequence[RolloutGroup], sampling: SamplingParams | None
) -> Sequence[RolloutGroup]:
    """One greedy rollout of each group's prompt with the weights of the moment; none without `sampling`."""
    if sampling is None:
        return ()
    return rollouts.evaluate([group.prompt for group in groups], sampling).groups


class Validation:
    """Scores the policy on validation prompts and ends the run when a goal is reached.

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
