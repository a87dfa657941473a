"""A draft model that learns what the policy samples."""

from __future__ import annotations

from dataclasses import dataclass

from rl_algos.losses.nll import NLLLoss
from rl_algos.rollouts.training.batch import minibatches
from rl_algos.rollouts.training.metrics import training_metrics
from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import Model


@dataclass(frozen=True)
class Drafter:
    """Trains a draft model on the rollouts of the policy.

    The likelihood of sampled tokens is an unbiased estimate of the divergence of the drafter from the policy, up to
    the policy's entropy, so no pass of the policy is needed.

    Args:
        model: The draft model.
        rows: Rollouts of one optimizer step.
    """

    model: Model
    rows: int

    def learn(self, batch: Batch) -> dict[str, Metric]:
        """Train on the rollouts of a step, once each; returns the metrics of the step."""
        updates = [self.model.train_step(minibatch, NLLLoss()) for minibatch in minibatches(batch, self.rows)]
        return training_metrics(updates, prefix="drafter")
