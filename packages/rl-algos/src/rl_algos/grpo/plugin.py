"""GRPO as a plugin: its config sections, the checks of them together, and the place of its code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from rl_algos.distillation.config import teacher_sections
from rl_algos.distillation.plugin import TEACHERS, self_teacher_problems, short_teachers, teacher_needs
from rl_algos.grpo.config import (
    GRPOConfig,
    GRPORoot,
    TrainedAgentConfig,
    TrainedAgentsConfig,
    TrainedEnvironmentConfig,
    TrainedEnvironmentsConfig,
    trained_agents,
    trained_environments,
)
from rl_algos.grpo.estimators import ESTIMATORS, chosen, estimator_section, inputs_of, reads, reads_turns
from rl_algos.grpo.opponents import fixed_models, opponent_problems
from rl_algos.judges.config import turn_problems
from rl_algos.losses.custom import chosen_type, loss_requirements
from rl_algos.policy_gradient.config import CustomLossConfig, LossConfig
from rl_algos.policy_gradient.loss import columns_of
from rl_algos.policy_gradient.plugin import loss_fn_section, loss_problems, policy_need
from rl_algos.rollouts.checks import reward_problems
from rl_algos.rollouts.plugin import rollout_algorithm, sections_by_name
from rl_core.config import Config, Problem, assemble, is_changed, settings_of
from rl_core.plugins import ModelNeed, TrainingDefaults, WrittenValues


def grpo_section(written: Any) -> type[Config]:
    """Return the type of `grpo`, with the settings of the estimators and the agents that are written there."""
    estimator = written.get("adv_estimator") if isinstance(written, Mapping) else None
    kind = chosen_type("adv_estimator.name", estimator, estimator_section)
    agents = sections_by_name(written, "agents", TrainedAgentsConfig, partial(_with_estimator, TrainedAgentConfig))
    of_environment, remedy = (
        partial(_with_estimator, TrainedEnvironmentConfig),
        "Give it a name in `env`, with its `type`",
    )
    environments = sections_by_name(written, "environments", TrainedEnvironmentsConfig, of_environment, remedy=remedy)
    sections = {"adv_estimator": kind, "agents": agents, "environments": environments}
    return assemble("GRPO", sections, base=GRPOConfig)


def _with_estimator(base: type[Config], name: str, written: Any) -> type[Config]:
    """Return the type of the section of an agent or an environment, with the settings of its estimator."""
    estimator = written.get("adv_estimator") if isinstance(written, Mapping) else None
    key = "agents" if base is TrainedAgentConfig else "environments"
    kind = chosen_type(f"{key}.{name}.adv_estimator.name", estimator, estimator_section)
    return assemble(base.__name__.removesuffix("Config"), {"adv_estimator": kind}, base=base)


def models(config: GRPORoot) -> dict[str, ModelNeed]:
    """Return the policy, which trains, and teachers, if there are some."""
    return {"policy": policy_need(config, config.grpo), **teacher_needs(config)}


def check(config: GRPORoot) -> Iterable[Problem]:
    """Yield problems of the whole resolved config, after the problems of its rollouts."""
    by_turn = f"grpo.adv_estimator={chosen(config.grpo)}" if reads(config.grpo, "turn_rewards") else ""
    yield from reward_problems(config.grpo, by_turn=by_turn)
    yield from loss_problems(config, config.grpo)
    yield from _estimator(config.grpo, config.loss_fn)
    yield from opponent_problems(config.grpo)
    yield from _teachers(config)
    by_turn = "grpo.adv_estimator to turn_returns, mt_grpo or gigpo"
    yield from turn_problems(config, config.grpo.turn_limit, partial(reads_turns, config.grpo), allowed=by_turn)
    for agent, settings in trained_agents(config.grpo).items():
        key = f"grpo.agents.{agent}"
        for name in ("weight", "adv_estimator"):
            if not settings.train and is_changed(settings, name):
                yield Problem.unused(f"{key}.{name}", f"with {key}.train=false")
    places: dict[str, TrainedAgentConfig | TrainedEnvironmentConfig] = {
        **{f"agents.{name}": own for name, own in trained_agents(config.grpo).items() if own.train},
        **{f"environments.{name}": own for name, own in trained_environments(config.grpo).items()},
    }
    for place, own in places.items():
        if own.adv_estimator.name is None and is_changed(own, "adv_estimator"):
            key = f"grpo.{place}.adv_estimator"
            yield Problem.unused(key, "without a name", remedy=f"Set {key}.name")


def _teachers(config: GRPORoot) -> Iterator[Problem]:
    """Yield problems of the advantages by teachers."""
    settings, key = config.grpo.distillation, "grpo.distillation"
    own, loss = settings.self_teacher, config.loss_fn
    if own is not None:
        yield from self_teacher_problems(config, config.grpo, own, f"{key}.self_teacher")
    elif not teacher_sections(config):
        remedy = f"Set teacher.model_name or {key}.self_teacher, or remove this key"
        for name in ("weight", "reward_weight"):
            if is_changed(settings, name):
                yield Problem.unused(f"{key}.{name}", "without a teacher", remedy=remedy)
        return
    yield from short_teachers(config)
    if config.grpo.structured_output == "constrain":
        reason = "computes the policy's logprobs over the tokens that a grammar allows, but teachers have all tokens"
        remedy = "Set it to ignore, or remove the teachers"
        yield Problem("grpo.structured_output", reason, got="constrain", remedy=remedy)
    columns = columns_of(config, config.grpo)
    if not isinstance(loss, LossConfig) and columns and "advantages" not in columns:
        yield Problem("loss_fn.name", "does not read advantages, by which the teachers teach", got=loss.name)
    if not settings.reward_weight:
        for name in ("adv_estimator", "normalize_rewards", "use_leave_one_out_baseline"):
            if is_changed(config.grpo, name):
                yield Problem.unused(f"grpo.{name}", f"with {key}.reward_weight=0")


def _estimator(grpo: GRPOConfig, loss: LossConfig | CustomLossConfig) -> Iterator[Problem]:
    """Yield problems of the effective estimator with the settings of the loop and of the loss."""
    samples, name = grpo.num_generations_per_prompt, chosen(grpo)
    if grpo.serves_users:
        yield from _of_users(grpo)
    elif samples < 2 and grpo.distillation.reward_weight:
        reason = "must be at least 2, because the rollouts of a prompt are compared with each other"
        yield Problem("grpo.num_generations_per_prompt", reason, got=samples)
    if grpo.adv_estimator.name is not None and grpo.use_leave_one_out_baseline:
        reason = f"selects the estimator rloo, but grpo.adv_estimator.name is {grpo.adv_estimator.name}"
        yield Problem("grpo.use_leave_one_out_baseline", reason, got=True, remedy="Set only one of the two")
    if grpo.num_iterations > 1 and isinstance(loss, LossConfig) and loss.surrogate.name == "reinforce":
        reason = "needs a ratio to the policy before the first pass, but the surrogate reinforce has no ratio"
        remedy = "Set it to 1, or use another loss_fn.surrogate"
        yield Problem("grpo.num_iterations", reason, got=grpo.num_iterations, remedy=remedy)
    if not grpo.normalize_rewards and not reads(grpo, "normalize"):
        yield Problem.unused("grpo.normalize_rewards", f"with the estimator {name}")
    if not (reads(grpo, "rewards") or reads(grpo, "turn_rewards")):
        for section in ("reward_scaling", "reward_shaping"):
            if getattr(grpo, section).enabled:
                because = f"with the estimator {name}, which reads the unchanged rewards"
                yield Problem.unused(f"grpo.{section}.enabled", because)
        if isinstance(loss, LossConfig) and loss.kl.in_reward:
            yield Problem.unused("loss_fn.kl.in_reward", f"with the estimator {name}")
    estimators = {"grpo": grpo.adv_estimator}
    estimators |= {f"grpo.agents.{key}": own.adv_estimator for key, own in trained_agents(grpo).items()}
    estimators |= {f"grpo.environments.{key}": own.adv_estimator for key, own in trained_environments(grpo).items()}
    for key, estimator in estimators.items():
        if estimator.name == "pass_at_k" and not 1 <= (k := settings_of(estimator)["k"]) <= samples:
            allowed = f"int from 1 to grpo.num_generations_per_prompt ({samples})"
            yield Problem(f"{key}.adv_estimator.k", got=k, allowed=allowed)


def _of_users(grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield estimators that cannot learn from conversations of users."""
    name, key = chosen(grpo), "grpo.adv_estimator.name"
    fitting = ", ".join(each for each in ESTIMATORS if not {"groups", "baselines"} & set(inputs_of(ESTIMATORS[each])))
    if reads(grpo, "baselines"):
        reason = "compares with a greedy rollout of the prompt, but users have seen theirs already"
        yield Problem(key, reason, got=name, allowed=fitting)
    elif grpo.num_generations_per_prompt == 1 and reads(grpo, "groups"):
        reason = "compares the rollouts of a group, but with num_generations_per_prompt=1 conversations are single"
        remedy = "Or set grpo.num_generations_per_prompt, and let users name the task in the header X-RL-Task"
        yield Problem(key, reason, got=name, allowed=fitting, remedy=remedy)


def training_defaults(written: WrittenValues) -> dict[str, TrainingDefaults]:
    """Return the defaults of one update of the policy with all rollouts of a step."""
    return {"policy": TrainingDefaults(lr=1e-6, adapter_lr=1e-5, rows=GRPOConfig.rollouts_written(written))}


PLUGIN = rollout_algorithm(
    "grpo",
    sections={"grpo": grpo_section, "loss_fn": loss_fn_section},
    implementation="rl_algos.grpo.loop:GRPO",
    models=models,
    optional_models=TEACHERS,
    training_defaults=training_defaults,
    reads_filtered=True,
    further=lambda config: loss_requirements(config.loss_fn.name),
    checks=(check,),
    further_models=lambda config: fixed_models(config.grpo),
)
