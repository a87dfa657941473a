"""GRPO (arXiv:2402.03300): sample groups, compare rewards within each, and take a clipped policy-gradient step."""

from __future__ import annotations

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of, by_rollout
from rl_algos.grpo.objective import Objective, with_logprobs
from rl_algos.grpo.step_statistics import StepData
from rl_algos.rollouts.batch import build_batch, minibatches, with_advantages
from rl_algos.rollouts.metrics import rollout_metrics, training_metrics
from rl_algos.rollouts.steps import RolloutSteps
from rl_algos.rollouts.validation import Validation
from rl_core.generation import RolloutSource, SamplingParams, Weights
from rl_core.model import Model
from rl_core.run import Run


def train(
    config: GRPOConfig,
    objective: Objective,
    *,
    policy: Model,
    rollouts: RolloutSource,
    weights: Weights,
    validation: Validation,
    run: Run,
    rows_per_minibatch: int,
    greedy: SamplingParams | None = None,
) -> None:
    """Train the policy for `config.max_num_steps` steps, or until the data or the run ends.

    Whether rollouts are synchronous, where models run and on what backend are properties of the objects handed in.
    `RolloutSteps` begins each step with its rollouts, and ends it with validation and checkpoint. `greedy` is how
    baseline rollouts are drawn, for an estimator that compares with them.
    """
    steps = RolloutSteps(config, rollouts, weights, validation, run, greedy)
    for step, groups, aside, baselines in steps.take(models={"policy": policy}, state={"objective": objective}):
        batch = build_batch(groups, config)
        with run.phase("logprobs"):
            batch = with_logprobs(batch, policy, objective)
        advantages = advantages_of(groups, config, penalties=objective.penalties(batch), greedy=baselines)
        batch = objective.prepared(StepData(step, groups, with_advantages(batch, advantages)))
        loss = objective.loss
        with run.phase("training"):
            updates = [policy.train_step(minibatch, loss) for minibatch in minibatches(batch, rows_per_minibatch)]
        steps.sync(step)
        metrics = training_metrics(updates)
        run.record(step, {**metrics, **objective.observe(metrics)})
        run.record(step, rollout_metrics(groups, aside, advantages))
        run.record_rollouts(step, [*groups, *aside], by_rollout(advantages, groups))
