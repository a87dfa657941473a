"""From the resolved config to the objects of the GRPO loop."""

from __future__ import annotations

from dataclasses import replace

from rl_algos.grpo.config import GRPORoot
from rl_algos.grpo.estimators import reads
from rl_algos.grpo.loop import train
from rl_algos.grpo.loss import objective_of
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.setup import source_of, training_sampling, validation_of
from rl_core.run import Components, Run


def run(config: GRPORoot, components: Components, run: Run) -> None:
    """Train as the config says."""
    data: RolloutData = components.data
    assert components.pool is not None, "GRPO generates"
    assert components.weights is not None, "GRPO generates"
    greedy = replace(training_sampling(config.policy.generation, data.end_of_sequence), temperature=0.0)
    train(
        config.grpo,
        objective_of(config, config.grpo),
        policy=components.models["policy"],
        rollouts=source_of(config, data, components.pool),
        weights=components.weights,
        validation=validation_of(config, data),
        run=run,
        rows_per_minibatch=config.policy.train_global_batch_size,
        greedy=greedy if reads(config.grpo, "baselines") else None,
    )
