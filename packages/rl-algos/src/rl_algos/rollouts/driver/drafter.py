"""A draft model, or a draft head of the policy, that learns what the policy samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_algos.losses.nll import NLLLoss
from rl_algos.rollouts.drafter import DRAFTER
from rl_algos.rollouts.training.batch import minibatches
from rl_algos.rollouts.training.metrics import training_metrics
from rl_core.data.batch import Batch
from rl_core.metrics import Metric
from rl_core.model import Loss, Model


@dataclass(frozen=True)
class Drafter:
    """Trains a drafter on the rollouts of the policy.

    A draft model learns by the likelihood of sampled tokens, an unbiased estimate of its divergence from the policy, up
    to the policy's entropy, so no pass of the policy is needed. A draft head reads a pass of the policy in any case, so
    it learns the distributions of that pass.

    Args:
        model: The drafter.
        rows: Rollouts of one optimizer step.
        loss: Objective of the drafter.
        section: Dotted key of its config section, for messages.
    """

    model: Model
    rows: int
    loss: Loss = field(default_factory=NLLLoss)
    section: str = DRAFTER

    def learn(self, batch: Batch) -> dict[str, Metric]:
        """Train on the rollouts of a step, once each; returns the metrics of the step."""
        updates = [self.model.train_step(minibatch, self.loss) for minibatch in minibatches(batch, self.rows)]
        return training_metrics(updates, prefix="drafter")
