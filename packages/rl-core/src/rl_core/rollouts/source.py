"""Where a loop takes its rollouts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt
from rl_core.weights import WeightUpdate


@dataclass(frozen=True)
class Evaluation:
    """Rollouts of an evaluation, grouped by prompt, in the order of the prompts."""

    groups: Sequence[RolloutGroup]

    @property
    def rewards(self) -> np.ndarray:
        """float64 `[prompts]`, mean reward per prompt; a failed rollout earns 0."""
        return np.array([np.nan_to_num(group.rewards()).mean() for group in self.groups])


class RolloutSource(Protocol):
    """Generation as a loop sees it, synchronous or ahead of training."""

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """The next groups, each prompt once; with weights at most the source's staleness old.

        Args:
            num_groups: Number of groups to return; fewer come at the end of the data.
            num_later: Groups that later steps will need, beyond which nothing is sampled ahead; None if that is not
                known.
        """
        ...

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected since the last `adopt` train nothing, and why."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the groups that were collected since the last `adopt`, by the names that a run records."""
        ...

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights; trains nothing and moves no data position."""
        ...

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version, verified; raises `WeightSyncError` naming what did not arrive.

        The groups that were collected before count as trained, except those that were set aside.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Data position and buffered rollouts, to be saved with a checkpoint: as of the last `adopt`.

        Groups that were collected since then come again after `restore`, so that a step that collected and did not
        train (its data ended) loses no prompt.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...
