"""GRPO (arXiv:2402.03300): sample groups, compare rewards within each, and take a clipped policy-gradient step."""

from __future__ import annotations

from rl_algos.grpo.batch import build_batch, minibatches, with_logprobs
from rl_algos.grpo.collect import Validation, collect_groups
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of, by_rollout
from rl_algos.grpo.metrics import rollout_metrics, training_metrics
from rl_core.generation import RolloutSource, Weights
from rl_core.model import Loss, Model
from rl_core.run import Run


def train(
    config: GRPOConfig,
    loss: Loss,
    *,
    policy: Model,
    rollouts: RolloutSource,
    weights: Weights,
    validation: Validation,
    run: Run,
    rows_per_minibatch: int,
) -> None:
    """Train the policy for `config.max_num_steps` steps, or until the data or the run ends.

    Whether rollouts are synchronous, where models run and on what backend are properties of the objects handed in.
    """
    steps = run.steps(config.max_num_steps, models={"policy": policy}, state={"rollouts": rollouts, "weights": weights})
    with run.phase("weight_sync"):
        rollouts.adopt(weights.publish())
    for step in steps:
        if step == 1 and config.val_at_start:
            validation(rollouts, run, step=0)
        with run.phase("generation"):
            groups, aside = collect_groups(rollouts, config)
        if len(groups) < config.num_prompts_per_step:
            run.stop("the data has ended")
            break
        advantages = advantages_of(groups, config)
        batch = build_batch(groups, advantages, config)
        with run.phase("logprobs"):
            batch = with_logprobs(batch, policy, loss)
        with run.phase("training"):
            updates = [policy.train_step(minibatch, loss) for minibatch in minibatches(batch, rows_per_minibatch)]
        with run.phase("weight_sync"):
            update = weights.publish()
            rollouts.adopt(update)
        run.record(step, {"weight_version": update.version, **training_metrics(updates)})
        run.record(step, rollout_metrics(groups, aside, advantages))
        run.record_rollouts(step, [*groups, *aside], by_rollout(advantages, groups))
        if run.due(config.val_period, step, at_end=config.val_at_end):
            validation(rollouts, run, step=step)
