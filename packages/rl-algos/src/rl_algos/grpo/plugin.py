"""GRPO as a plugin: its config sections, what they must satisfy together, and where its code is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl_algos.grpo.config import (
    GRPOConfig,
    GRPORoot,
    TrainedAgentConfig,
    TrainedAgentsConfig,
    trained_agents,
)
from rl_algos.grpo.estimators import chosen, estimator_section, reads
from rl_algos.grpo.opponents import fixed_models, opponent_problems
from rl_algos.losses.custom import loss_requirements
from rl_algos.policy_gradient.loss_checks import loss_problems
from rl_algos.policy_gradient.loss_config import LossConfig
from rl_algos.policy_gradient.plugin import chosen_type, loss_fn_section, policy_need
from rl_algos.rollouts.checks import reward_problems
from rl_algos.rollouts.plugin import rollout_algorithm
from rl_core.config import Config, Problem, ProblemError, assemble, is_changed, settings_of
from rl_core.plugins import ModelNeed, TrainingDefaults, WrittenValues


def grpo_section(written: Any) -> type[Config]:
    """The type of `grpo`, with the settings of the estimators and the agents that are written there."""
    estimator = written.get("adv_estimator") if isinstance(written, Mapping) else None
    kind = chosen_type("adv_estimator.name", estimator, estimator_section)
    agents = written.get("agents") if isinstance(written, Mapping) else None
    return assemble("GRPO", {"adv_estimator": kind, "agents": _agents_section(agents)}, base=GRPOConfig)


def _agents_section(written: Any) -> type[Config]:
    """The type of `grpo.agents`: a section for each agent that is written there."""
    if not isinstance(written, Mapping):
        return TrainedAgentsConfig
    kinds: dict[str, type[Config]] = {}
    for agent, settings in written.items():
        if not isinstance(agent, str) or not agent.isidentifier():
            raise ProblemError(
                Problem(
                    "agents",
                    "has a key that cannot be the name of an agent",
                    got=agent,
                    allowed="letters, digits and underscores, not a digit first",
                )
            )
        estimator = settings.get("adv_estimator") if isinstance(settings, Mapping) else None
        kind = chosen_type(f"agents.{agent}.adv_estimator.name", estimator, estimator_section)
        kinds[agent] = assemble("TrainedAgent", {"adv_estimator": kind}, base=TrainedAgentConfig)
    return assemble("TrainedAgents", kinds, base=TrainedAgentsConfig)


def models(config: GRPORoot) -> dict[str, ModelNeed]:
    """Return the policy, the only model."""
    return {"policy": policy_need(config, config.grpo)}


def check(config: GRPORoot) -> Iterable[Problem]:
    """Yield problems of the whole resolved config, in addition to those of its rollouts."""
    yield from reward_problems(config.grpo)
    yield from loss_problems(config, config.grpo)
    yield from _estimator(config)
    yield from _agents(config)


def _agents(config: GRPORoot) -> Iterator[Problem]:
    """Yield settings of agents that have no effect or contradict one another."""
    yield from opponent_problems(config)
    for agent, settings in trained_agents(config.grpo).items():
        key = f"grpo.agents.{agent}"
        for name in ("weight", "adv_estimator"):
            if not settings.train and is_changed(settings, name):
                yield Problem.unused(f"{key}.{name}", f"with {key}.train=false")
        if settings.train and settings.adv_estimator.name is None and is_changed(settings, "adv_estimator"):
            yield Problem.unused(f"{key}.adv_estimator", "without a name", remedy=f"Set {key}.adv_estimator.name")


def _estimator(config: GRPORoot) -> Iterator[Problem]:
    grpo = config.grpo
    if grpo.num_generations_per_prompt < 2:
        yield Problem(
            "grpo.num_generations_per_prompt",
            "must be at least 2, because the rollouts of a prompt are compared with each other",
            got=grpo.num_generations_per_prompt,
        )
    if grpo.adv_estimator.name is not None and grpo.use_leave_one_out_baseline:
        yield Problem(
            "grpo.use_leave_one_out_baseline",
            f"selects the estimator rloo, but grpo.adv_estimator.name is {grpo.adv_estimator.name}",
            got=True,
            remedy="Set only one of the two",
        )
    loss = config.loss_fn
    if grpo.num_iterations > 1 and isinstance(loss, LossConfig) and loss.surrogate.name == "reinforce":
        yield Problem(
            "grpo.num_iterations",
            "needs a ratio to the policy before the first pass, but the surrogate reinforce has no ratio",
            got=grpo.num_iterations,
            remedy="Set it to 1, or use another loss_fn.surrogate",
        )
    name, settings = chosen(grpo), settings_of(grpo.adv_estimator)
    if not grpo.normalize_rewards and not reads(grpo, "normalize"):
        yield Problem.unused("grpo.normalize_rewards", f"with the estimator {name}")
    if not reads(grpo, "rewards"):
        for section in ("reward_scaling", "reward_shaping"):
            if getattr(grpo, section).enabled:
                yield Problem.unused(
                    f"grpo.{section}.enabled", f"with the estimator {name}, which reads the unchanged rewards"
                )
        if isinstance(loss, LossConfig) and loss.kl.in_reward:
            yield Problem.unused("loss_fn.kl.in_reward", f"with the estimator {name}")
    if name == "pass_at_k" and not 1 <= settings["k"] <= grpo.num_generations_per_prompt:
        yield Problem(
            "grpo.adv_estimator.k",
            got=settings["k"],
            allowed=f"int from 1 to grpo.num_generations_per_prompt ({grpo.num_generations_per_prompt})",
        )


def training_defaults(written: WrittenValues) -> dict[str, TrainingDefaults]:
    """One update of the policy with all the rollouts of a step."""
    return {"policy": TrainingDefaults(lr=1e-6, adapter_lr=1e-5, rows=GRPOConfig.rollouts_written(written))}


PLUGIN = rollout_algorithm(
    "grpo",
    sections={"grpo": grpo_section, "loss_fn": loss_fn_section},
    implementation="rl_algos.grpo.algorithm:GRPO",
    models=models,
    training_defaults=training_defaults,
    reads_filtered=True,
    further=lambda config: loss_requirements(config.loss_fn.name),
    checks=(check,),
    further_models=fixed_models,
)
