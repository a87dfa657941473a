"""Opponents of the policy: engines with other weights, next to a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.plugins import OpponentNeed
from rl_core.rollouts.generation import Generator

_OF_OPPONENTS = 0x6F70
"""Entropy of the draws of who is an opponent; other draws from a play's seed have other entropy."""

_COUNTS = ("num_requests", "num_sampled")
"""Numbers of an engine's health that show its progress."""


@dataclass(frozen=True)
class OpponentSpec:
    """An opponent; sent to the process of a rollout worker.

    Args:
        need: Name, and the agents whose turns it takes.
        generator_args: Arguments of its generator.
    """

    need: OpponentNeed
    generator_args: tuple[Any, ...]


class Opponents:
    """The engines of the opponents of a rollout worker.

    Args:
        engine: Makes a generator from its arguments.
        specs: The opponents.
    """

    def __init__(self, engine: Callable[..., Generator], specs: Sequence[OpponentSpec]) -> None:
        self._needs = [spec.need for spec in specs]
        self._engines = {spec.need.name: engine(*spec.generator_args) for spec in specs}

    def __getitem__(self, name: str) -> Generator:
        return self._engines[name]

    def of_play(self, seed: int) -> Mapping[str, Generator]:
        """Return the engines of the agents that are opponents in the play of a seed."""
        return {agent: self._engines[name] for agent, name in opponents_of_play(self._needs, seed).items()}

    async def start(self) -> None:
        """Load the engines one after another: each measures the memory that is free."""
        for engine in self._engines.values():
            await engine.start()

    async def call_all(self, method: str) -> None:
        """Call a method of every engine."""
        for engine in self._engines.values():
            await getattr(engine, method)()

    async def with_health(self, health: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the report of another engine with the counts of these added; raise `GeneratorError` if one is dead."""
        if not self._engines:
            return health
        reports = [health, *[await engine.health() for engine in self._engines.values()]]
        return {**health, **{name: sum(report[name] for report in reports) for name in _COUNTS}}


def opponents_of_play(needs: Sequence[OpponentNeed], seed: int) -> dict[str, str]:
    """Return the name of the opponent of each agent that is one in a play.

    An opponent with a share of 1 takes part in every play. The others take part in disjoint shares of the plays, so
    that two players who alternate are never opponents at once.

    Args:
        needs: The opponents; shares below 1 add up to at most 1.
        seed: Seed of the play.
    """
    drawn = float(np.random.default_rng((seed, _OF_OPPONENTS)).random())
    found, start = {}, 0.0
    for need in needs:
        for agent, share in need.shares.items():
            begin, start = (0.0, start) if share == 1 else (start, start + share)
            if begin <= drawn < begin + share:
                found[agent] = need.name
    return found
