"""PPO as a plugin: its config sections, the checks of them together, and the place of its code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_algos.judges.config import turn_problems
from rl_algos.losses.custom import loss_requirements
from rl_algos.policy_gradient.plugin import loss_fn_section, loss_problems, policy_need
from rl_algos.ppo.config import PPOConfig, PPORoot, learning_agents
from rl_algos.rollouts.checks import length_problem, minibatch_problem, reward_problems
from rl_algos.rollouts.config import WeightedAgentConfig, WeightedAgentsConfig
from rl_algos.rollouts.plugin import rollout_algorithm, sections_by_name
from rl_core.config import Config, Problem, assemble, is_changed
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults, WrittenValues


def ppo_section(written: Any) -> type[Config]:
    """Return the type of `ppo`, with the agents that are written there."""
    agents = sections_by_name(written, "agents", WeightedAgentsConfig, lambda _name, _settings: WeightedAgentConfig)
    return assemble("PPO", {"agents": agents}, base=PPOConfig)


def models(config: PPORoot) -> dict[str, ModelNeed]:
    """Return the policy and the critic, which both train."""
    critic = ModelSpec(role="critic", seed=config.ppo.seed)
    return {
        "policy": policy_need(config, config.ppo),
        "critic": ModelNeed("value", critic, exported=config.ppo.export_critic),
    }


def check(config: PPORoot) -> Iterator[Problem]:
    """Yield problems of the whole resolved config, in addition to problems of its rollouts."""
    ppo, value = config.ppo, config.value
    yield from reward_problems(ppo, by_turn="ppo.rewards_by_turn" if ppo.rewards_by_turn else "")
    yield from loss_problems(config, ppo)
    allowed = "ppo.rewards_by_turn=true"
    yield from turn_problems(config, ppo.turn_limit, lambda environment: ppo.rewards_by_turn, allowed=allowed)
    for agent, settings in learning_agents(ppo).items():
        if not settings.train and is_changed(settings, "weight"):
            yield Problem.unused(f"ppo.agents.{agent}.weight", f"with ppo.agents.{agent}.train=false")
    if ppo.demonstrations.share:
        reason = "is for rewards that are compared within a group; the critic predicts the policy's own returns"
        remedy = "Set ppo.demonstrations.dataset and rows_per_step instead, or use GRPO"
        yield Problem("ppo.demonstrations.share", reason, got=ppo.demonstrations.share, remedy=remedy)
    yield from minibatch_problem(ppo, "value.train_global_batch_size", value.train_global_batch_size)
    yield from length_problem(config.policy, "value", value.max_total_sequence_length)
    if ppo.critic_warmup_steps >= ppo.max_num_steps:
        reason = f"must be less than ppo.max_num_steps ({ppo.max_num_steps}), or no step would train the policy"
        yield Problem("ppo.critic_warmup_steps", reason, got=ppo.critic_warmup_steps)
    if ppo.use_dynamic_sampling and ppo.num_generations_per_prompt < 2:
        remedy = "Set ppo.num_generations_per_prompt to 2 or more, or remove this key"
        reason = "needs at least 2 rollouts per prompt to compare"
        yield Problem("ppo.use_dynamic_sampling", reason, got=True, remedy=remedy)
    is_set = ppo.gae_lambda != PPOConfig.model_fields["gae_lambda"].default
    if is_set and ppo.length_adaptive_alpha is not None and ppo.critic_gae_lambda is not None:
        because = "with length_adaptive_alpha and critic_gae_lambda, which set both lambdas"
        yield Problem.unused("ppo.gae_lambda", because)


def training_defaults(written: WrittenValues) -> dict[str, TrainingDefaults]:
    """Return four updates a step if its rollouts divide by four, and a critic that learns faster than the policy."""
    rollouts = PPOConfig.rollouts_written(written)
    rows = rollouts if rollouts % 4 else rollouts // 4
    return {
        "policy": TrainingDefaults(lr=1e-6, adapter_lr=1e-5, rows=rows),
        "value": TrainingDefaults(lr=1e-5, adapter_lr=1e-4, rows=rows),
    }


PLUGIN = rollout_algorithm(
    "ppo",
    sections={"ppo": ppo_section, "loss_fn": loss_fn_section},
    implementation="rl_algos.ppo.loop:PPO",
    models=models,
    training_defaults=training_defaults,
    reads_filtered=True,
    further=lambda config: loss_requirements(config.loss_fn.name),
    model_sections=("policy", "value"),
    checks=(check,),
)
