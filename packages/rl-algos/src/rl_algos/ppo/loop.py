"""PPO (arXiv:1707.06347): sample, have a critic value every token, and take clipped steps of the critic and the policy
over several passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_algos.losses.tokens import ValueLoss
from rl_algos.policy_gradient.advantages import by_rollout
from rl_algos.policy_gradient.loss import objective_of
from rl_algos.policy_gradient.objective import Objective, StepData, with_logprobs
from rl_algos.ppo.config import PPOConfig, PPORoot, learning_agents
from rl_algos.ppo.estimates import estimates_of, value_metrics, values_of, with_returns
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.setup import steps_of
from rl_algos.rollouts.training.agents import AgentWatch, trained_batch
from rl_algos.rollouts.training.batch import build_batch, shuffled_minibatches, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics, training_metrics
from rl_core.model import Model
from rl_core.run import Checkpointable, Components, Run

if TYPE_CHECKING:
    from rl_algos.rollouts.training.demonstrations import DemonstrationRows


def train(
    config: PPOConfig,
    objective: Objective,
    *,
    policy: Model,
    critic: Model,
    steps: RolloutSteps,
    policy_rows: int,
    critic_rows: int,
    demonstrations: DemonstrationRows | None = None,
) -> None:
    """Train policy and critic for `config.max_num_steps` steps, or until the data or the run ends.

    Args:
        config: Config section of the algorithm.
        objective: Objective of the policy; see GRPO.
        policy: Policy to train.
        critic: Critic to train, which predicts the return from the state before each token.
        steps: Rollouts of each step, weight sync, validation and checkpoints.
        policy_rows: Rollouts of one optimizer step of the policy.
        critic_rows: Rollouts of one optimizer step of the critic.
        demonstrations: Conversations that each step of the policy learns in addition to its rollouts; None for none.
    """
    run, value_loss = steps.run, ValueLoss(config.value_clip)
    models, agents = {"policy": policy, "critic": critic}, learning_agents(config)
    watch = AgentWatch(config.section, agents)
    state: dict[str, Checkpointable] = {"objective": objective}
    if demonstrations is not None:
        state["demonstrations"] = demonstrations.stream
    for step, groups, aside, _ in steps.take(models=models, state=state):
        watch.observe(groups)
        batch = trained_batch(build_batch(groups, config), groups, agents)
        with run.phase("values"):
            values = values_of(batch, groups, critic, config)
        with run.phase("logprobs"):
            batch = with_logprobs(batch, policy, objective)
        penalties = objective.penalties(batch)
        advantages, returns = estimates_of(batch, groups, values, config, penalties=penalties)
        passes, seed = config.num_ppo_epochs, (config.seed, step)
        with run.phase("critic_training"):
            learned = with_returns(batch, values, returns)
            minibatches = shuffled_minibatches(learned, critic_rows, passes=passes, seed=seed)
            of_critic = [critic.train_step(minibatch, value_loss) for minibatch in minibatches]
        run.record(step, training_metrics(of_critic, prefix="critic"))
        batch = with_advantages(batch, advantages)
        if step > config.critic_warmup_steps:
            batch = objective.prepared(StepData(step, groups, batch))
            loss = objective.loss
            with run.phase("training"):
                shown = None if demonstrations is None else demonstrations.take()
                minibatches = shuffled_minibatches(batch, policy_rows, passes=passes, seed=seed, demonstrations=shown)
                of_policy = [policy.train_step(minibatch, loss) for minibatch in minibatches]
                if run.due(config.reference_sync_period, step):
                    policy.update_reference(config.reference_mixup_alpha)
            metrics = training_metrics(of_policy)
            run.record(step, {**metrics, **objective.observe(metrics)})
        steps.sync(step, batch)
        run.record(step, value_metrics(batch, values, returns))
        run.record(step, rollout_metrics(groups, advantages))
        run.record_rollouts(step, [*groups, *aside], by_rollout(advantages, groups), batch=batch)


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
            demonstrations=components.data.demonstrations,
        )
