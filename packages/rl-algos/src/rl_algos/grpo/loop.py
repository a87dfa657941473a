"""GRPO (arXiv:2402.03300): sample groups, compare rewards within each, and take a clipped policy-gradient step."""

from __future__ import annotations

from rl_algos.grpo.agents import AgentWatch, trained_batch
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of
from rl_algos.policy_gradient.advantages import by_rollout
from rl_algos.policy_gradient.objective import Objective, with_logprobs
from rl_algos.policy_gradient.step_statistics import StepData
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.training.batch import build_batch, passes, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics, training_metrics
from rl_core.model import Model


def train(
    config: GRPOConfig, objective: Objective, *, policy: Model, steps: RolloutSteps, rows_per_minibatch: int
) -> None:
    """Train the policy for `config.max_num_steps` steps, or until the data or the run ends.

    Whether rollouts are synchronous, where models run and on what backend are properties of the objects handed in.

    Args:
        config: Config section of the algorithm.
        objective: Loss of the policy, with what is computed for it once a step.
        policy: Policy to train.
        steps: Rollouts of each step, weight sync, validation and checkpoints; with greedy rollouts for an estimator
            that compares with them.
        rows_per_minibatch: Plays of one optimizer step: rollouts, where all that a play returned count as one.
    """
    run, watch = steps.run, AgentWatch(config)
    for step, groups, aside, greedy in steps.take(models={"policy": policy}, state={"objective": objective}):
        watch.observe(groups)
        batch = trained_batch(build_batch(groups, config), groups, config)
        with run.phase("logprobs"):
            batch = with_logprobs(batch, policy, objective)
        penalties = objective.penalties(batch)
        advantages = advantages_of(groups, config, penalties=penalties, greedy=greedy, batch=batch)
        batch = objective.prepared(StepData(step, groups, with_advantages(batch, advantages)))
        loss = objective.loss
        with run.phase("training"):
            parts = passes(batch, rows_per_minibatch, count=config.num_iterations, seed=(config.seed, step))
            updates = [policy.train_step(minibatch, loss) for minibatch in parts]
            if run.due(config.reference_sync_period, step):
                policy.update_reference(config.reference_mixup_alpha)
        steps.sync(step, batch)
        metrics = training_metrics(updates)
        run.record(step, {**metrics, **objective.observe(metrics)})
        run.record(step, {**rollout_metrics(groups, advantages), **signal_metrics(groups, aside)})
        run.record_rollouts(step, [*groups, *aside], by_rollout(advantages, groups), batch=batch)
