"""Which agents train, in plays of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from rl_algos.rollouts.config import LearningAgentConfig
from rl_algos.rollouts.training.segments import to_rows
from rl_core.data.batch import Batch
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup

_log = logging.getLogger(__name__)


def agents_of(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return str `[rollouts]`, the agent of each; empty strings without names."""
    return np.array([agent for group in groups for agent in group.rollouts.agents], dtype=np.str_)


def trained_batch(batch: Batch, groups: Sequence[RolloutGroup], agents: Mapping[str, LearningAgentConfig]) -> Batch:
    """Return the batch with an empty loss mask at the rollouts of agents that do not train.

    Args:
        batch: Batch of the groups, from `build_batch`.
        groups: Groups of the step.
        agents: Settings of agents by name.
    """
    left_out = [agent for agent, settings in agents.items() if not settings.train]
    if not left_out:
        return batch
    return batch.with_zeros(LOSS_MASK, to_rows(batch, np.isin(agents_of(groups), left_out)))


class AgentWatch:
    """Warns once of each agent in the config that no rollout of a step has, such as one whose name is misspelt.

    Args:
        section: Key of the section of the algorithm.
        agents: Settings of agents by name.
    """

    def __init__(self, section: str, agents: Mapping[str, LearningAgentConfig]) -> None:
        self._section = section
        self._missing = set(agents)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Look at the rollouts of a step."""
        if not self._missing:
            return
        plays = [part for group in groups for part in (group, group.opponents) if part is not None]
        found = sorted({agent for part in plays for agent in part.rollouts.agents if agent})
        for agent in sorted(self._missing.difference(found)):
            names, key = ", ".join(found) or "unnamed", f"{self._section}.agents.{agent}"
            _log.warning("%s has no effect so far: the agents of this step are %s", key, names)
        self._missing.clear()
