"""The needs of a run's judges: engines in rollout workers, and rewards of environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rl_algos.judges.config import (
    EndpointJudgeConfig,
    GeneratorJudgeConfig,
    RewardModelJudgeConfig,
    functions_of_models,
    judge_sections,
    judged_rewards,
)
from rl_core.config import plain
from rl_core.plugins import OpponentNeed, RolloutNeeds

POLICY = "policy"
"""Model of a generator that is the policy itself."""


def with_judges(needs: RolloutNeeds, config: Any) -> RolloutNeeds:
    """Return the needs of rollout workers with the judges of a resolved config."""
    if not judge_sections(config):
        return needs
    judges = language_judges(config)
    rewards = judged_rewards(config)
    judged = {
        environment: own
        for environment, parts in rewards.items()
        if (own := {name: part for name, part in parts.items() if part.judge in judges})
    }
    scored = frozenset(
        name for name, parts in rewards.items() if any(part.judge not in judges for part in parts.values())
    )
    engines = tuple(
        OpponentNeed(
            engine_of(name, judge),
            {},
            update_every=judge.update_every,
            model_name=None if judge.model_name == POLICY else judge.model_name,
        )
        for name, judge in judges.items()
        if isinstance(judge, GeneratorJudgeConfig) and engine_of(name, judge)
    )
    later = functions_of_models(config)
    return replace(
        needs, opponents=(*needs.opponents, *engines), judges=judges, judged=judged, scored=scored, later=later
    )


def language_judges(config: Any) -> dict[str, EndpointJudgeConfig | GeneratorJudgeConfig]:
    """Return the judges of a resolved config that are language models, by name; none if its algorithm has no judges."""
    every = judge_sections(config)
    return {name: judge for name, judge in every.items() if not isinstance(judge, RewardModelJudgeConfig)}


def judges_identity(config: Any) -> list[Any]:
    """Return the settings that rewards by judges depend on, as plain values; none without judges."""
    if not (judges := judge_sections(config)):
        return []
    # This module imports aiohttp, which configs and plugins do not need.
    from rl_algos.judges.service import UNIDENTIFYING

    named = {
        name: {key: value for key, value in plain(judge).items() if key not in UNIDENTIFYING}
        for name, judge in judges.items()
    }
    rewards = judged_rewards(config).items()
    return [named, {name: {part: asdict(rubric) for part, rubric in parts.items()} for name, parts in rewards}]


def engine_of(name: str, judge: GeneratorJudgeConfig) -> str:
    """Return the name of a judge's engine next to the policy's; empty if the policy's own engine serves it."""
    return "" if judge.model_name == POLICY and judge.update_every is None else f"judge {name}"


def fixed_judges(config: Any) -> Mapping[str, str]:
    """Return the models of generators that never change, by their key."""
    return {
        f"judges.{name}.model_name": judge.model_name
        for name, judge in judge_sections(config).items()
        if isinstance(judge, GeneratorJudgeConfig) and judge.model_name != POLICY
    }


def has_generators(config: Any) -> bool:
    """Return whether an engine of the run judges."""
    return any(isinstance(judge, GeneratorJudgeConfig) for judge in judge_sections(config).values())
