"""A draft model that trains with the policy: its section of the config, and what it must satisfy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rl_algos.rollouts.checks import length_problem, minibatch_problem
from rl_algos.rollouts.config import RolloutRoot, rollout_config
from rl_core.config import Problem
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.plugins import ModelNeed, SectionNames, TrainingDefaults, WrittenValues

DRAFTER = "drafter"
"""Role and section of the draft model."""

ModelSections = tuple[str, ...] | Callable[[SectionNames], tuple[str, ...]]


def drafter_section(config: RolloutRoot) -> ModelConfig | None:
    """The section of the draft model; None if none trains."""
    found: ModelConfig | None = getattr(config, DRAFTER, None)
    return found


def sections_with_drafter(sections: ModelSections) -> Callable[[SectionNames], tuple[str, ...]]:
    """`model_sections` of an algorithm, and that of a draft model if the user wrote one."""

    def found(names_in: SectionNames) -> tuple[str, ...]:
        own = sections if isinstance(sections, tuple) else sections(names_in)
        return (*own, *((DRAFTER,) if names_in(DRAFTER) else ()))

    return found


def drafter_need(config: RolloutRoot) -> dict[str, ModelNeed]:
    """The draft model among the models of a run, by role."""
    if drafter_section(config) is None:
        return {}
    return {DRAFTER: ModelNeed(DRAFTER, ModelSpec(seed=rollout_config(config).seed), exported=True)}


def defaults_with_drafter(
    defaults: Callable[[WrittenValues], Mapping[str, TrainingDefaults]],
) -> Callable[[WrittenValues], Mapping[str, TrainingDefaults]]:
    """`training_defaults` of an algorithm, and those of a draft model if the user wrote its section: as many updates as
    the policy has, with a larger learning rate, because what it imitates moves."""

    def found(written: WrittenValues) -> Mapping[str, TrainingDefaults]:
        own = defaults(written)
        if "policy" not in own or not isinstance(written(DRAFTER), Mapping):
            return own
        return {**own, DRAFTER: TrainingDefaults(lr=1e-5, adapter_lr=1e-4, rows=own["policy"].rows)}

    return found


def drafter_problems(config: RolloutRoot) -> Iterator[Problem]:
    """Problems of the draft model's section."""
    drafter = drafter_section(config)
    if drafter is None:
        return
    yield from minibatch_problem(config, f"{DRAFTER}.train_global_batch_size", drafter.train_global_batch_size)
    yield from length_problem(config, DRAFTER, drafter.max_total_sequence_length)
