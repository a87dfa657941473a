"""Opponents of the policy: engines with other weights, next to a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.plugins import OpponentNeed

_OF_OPPONENTS = 0x6F70
"""Entropy of the draws of who is an opponent; other draws from a play's seed have other entropy."""


@dataclass(frozen=True)
class OpponentSpec:
    """An opponent; sent to the process of a rollout worker.

    Args:
        need: Name, and the agents whose turns it takes.
        generator_args: Arguments of its generator.
    """

    need: OpponentNeed
    generator_args: tuple[Any, ...]


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
