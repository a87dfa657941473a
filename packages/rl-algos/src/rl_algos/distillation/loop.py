"""On-policy distillation (GKD, arXiv:2306.13649): the student samples, a teacher scores what it said, and the student
learns the teacher's distributions. On given text the loop is that of `rl_algos.supervised.loop`."""

from __future__ import annotations

import numpy as np

from rl_algos.distillation.teachers import RolloutScorer
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.training.batch import build_batch, minibatches
from rl_algos.rollouts.training.metrics import rollout_metrics, training_metrics
from rl_core.model import Loss, Model


def train(
    config: RolloutConfig,
    loss: Loss,
    *,
    policy: Model,
    teachers: RolloutScorer,
    steps: RolloutSteps,
    rows_per_minibatch: int,
) -> None:
    """Train the student for `config.max_num_steps` steps, or until the data or the run ends.

    Where models run and on what backend are properties of the objects handed in.

    Args:
        config: Config section of the algorithm.
        loss: Loss of the student.
        policy: Student, the model to train.
        teachers: Teachers that score the rollouts.
        steps: Rollouts of each step, weight sync, validation and checkpoints.
        rows_per_minibatch: Rollouts of one optimizer step.
    """
    run = steps.run
    for step, groups, *_ in steps.take(models={"policy": policy}):
        with run.phase("teacher"):
            batch = teachers.scored(build_batch(groups, config), groups)
        with run.phase("training"):
            updates = [policy.train_step(minibatch, loss) for minibatch in minibatches(batch, rows_per_minibatch)]
        steps.sync(step, batch)
        run.record(step, {**training_metrics(updates), **rollout_metrics(groups)})
        run.record_rollouts(step, groups, np.zeros(0), batch=batch)
