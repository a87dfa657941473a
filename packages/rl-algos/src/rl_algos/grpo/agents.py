"""Agents of a step: which of them train, and settings of agents that do not occur."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from rl_algos.grpo.config import GRPOConfig, trained_agents
from rl_algos.rollouts.training.segments import to_rows
from rl_core.data.batch import Batch
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup

_log = logging.getLogger(__name__)


def trained_batch(batch: Batch, groups: Sequence[RolloutGroup], config: GRPOConfig) -> Batch:
    """Return the batch with an empty loss mask at the rollouts of agents that do not train.

    Args:
        batch: Batch of the groups, from `build_batch`.
        groups: Groups of the step.
        config: Config section of the algorithm.
    """
    left_out = {agent for agent, settings in trained_agents(config).items() if not settings.train}
    if not left_out:
        return batch
    agents = [agent for group in groups for agent in group.rollouts.agents]
    return batch.with_zeros(LOSS_MASK, to_rows(batch, np.array([agent in left_out for agent in agents])))


class AgentWatch:
    """Warns once of each agent in the config that no rollout of a step has, such as one whose name is misspelt.

    Args:
        config: Config section of the algorithm.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self._missing = set(trained_agents(config))

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Look at the rollouts of a step."""
        if not self._missing:
            return
        plays = [part for group in groups for part in (group, group.opponents) if part is not None]
        found = sorted({agent for part in plays for agent in part.rollouts.agents if agent})
        for agent in sorted(self._missing.difference(found)):
            names = ", ".join(found) or "unnamed"
            _log.warning("grpo.agents.%s has no effect so far: the agents of this step are %s", agent, names)
        self._missing.clear()
