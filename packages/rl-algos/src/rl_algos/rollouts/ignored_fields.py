"""Fields of agents' requests without effect, such as `temperature`, on their way to the driver."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from rl_core.rollouts.group import RolloutGroup

_log = logging.getLogger(__name__)

PREFIX = "ignored/"
"""Prefix of the fields in `Rollout.info`."""


def ignored_info(fields: Iterable[str]) -> Mapping[str, float]:
    """Return the entries of `Rollout.info` for the fields that a rollout's agent has set."""
    return {f"{PREFIX}{name}": 1.0 for name in sorted(fields)}


class IgnoredFieldsWatch:
    """Warns of each field once in a run."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """Warn of the fields that agents of these rollouts have set, and none before them."""
        infos = (info for group in groups for info in group.rollouts.info)
        found = {name.removeprefix(PREFIX) for info in infos for name in info if name.startswith(PREFIX)}
        if new := sorted(found - self._known):
            self._known |= found
            _log.warning(
                "agents set %s, without effect: policy.generation decides how completions are drawn, and the policy "
                "whether it calls a tool",
                ", ".join(new),
            )
