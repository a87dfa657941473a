"""GRPO, from the resolved config to the objects of its loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.grpo.config import GRPORoot
from rl_algos.grpo.estimators import columns_before, reads
from rl_algos.grpo.loop import train
from rl_algos.grpo.opponents import check_tokens, opponents_of
from rl_algos.policy_gradient.loss import objective_of
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.setup import steps_of
from rl_core.plugins import RolloutNeeds
from rl_core.run import Components, Run


class GRPO(RolloutAlgorithm[GRPORoot]):
    """Group-relative policy optimization and its family."""

    def prepare(self, config: GRPORoot, tokenizer: Any, loaded: Datasets) -> RolloutData:
        check_tokens(config, tokenizer)
        return super().prepare(config, tokenizer, loaded)

    def rollouts(self, config: GRPORoot, prepared: RolloutData) -> RolloutNeeds:
        return replace(super().rollouts(config, prepared), opponents=opponents_of(config.grpo))

    def run(self, config: GRPORoot, components: Components, run: Run) -> None:
        train(
            config.grpo,
            objective_of(config, config.grpo, read_before=columns_before(config.grpo), weights=components.weights),
            policy=components.models["policy"],
            steps=steps_of(config, components, run, with_greedy=reads(config.grpo, "baselines")),
            rows_per_minibatch=config.policy.train_global_batch_size,
        )
