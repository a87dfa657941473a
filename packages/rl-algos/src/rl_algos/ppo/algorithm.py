"""PPO, from the resolved config to the objects of its loop."""

from __future__ import annotations

from rl_algos.policy_gradient.loss import objective_of
from rl_algos.ppo.config import PPORoot
from rl_algos.ppo.loop import train
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.setup import steps_of
from rl_core.run import Components, Run


class PPO(RolloutAlgorithm[PPORoot]):
    """Proximal policy optimization with a critic."""

    def run(self, config: PPORoot, components: Components, run: Run) -> None:
        train(
            config.ppo,
            objective_of(config, config.ppo, weights=components.weights),
            policy=components.models["policy"],
            critic=components.models["critic"],
            steps=steps_of(config, components, run),
            policy_rows=config.policy.train_global_batch_size,
            critic_rows=config.value.train_global_batch_size,
        )
