"""The turns of a step's rollouts: their sampled tokens, rewards and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup


class TurnColumns(NamedTuple):
    """Turns of rollouts, a row per rollout. A failed one has one turn, with the reward NaN.

    Args:
        lengths: int64 `[turns]`, sampled tokens.
        rewards: float64 `[turns]`, which add up to the reward of the rollout as its environment gave it.
        states: int64 `[turns]`, equal for turns that answer the same messages.
    """

    lengths: Ragged
    rewards: Ragged
    states: Ragged

    def adding_up_to(self, rewards: np.ndarray) -> Ragged:
        """Return float64 `[turns]`, rewards that add up to other rewards of the rollouts, such as shaped ones: the last
        turn takes the difference, which belongs to no turn.

        Args:
            rewards: float `[rollouts]`.
        """
        values = self.rewards.values.copy()
        values[self.rewards.offsets[1:] - 1] += rewards - self.rewards.sums()
        return self.rewards.like(values)


def turns_of_rollouts(groups: Sequence[RolloutGroup], chosen: Sequence[int] | np.ndarray | None = None) -> TurnColumns:
    """Return the turns of rollouts of these groups, in order.

    Args:
        groups: Groups of a step.
        chosen: Places of the rollouts among all of them; None for all.

    Raises:
        ValueError: If the turns of a rollout do not have its sampled tokens.
    """
    reports = [report for group in groups for report in group.rollouts]
    rows: list[Sequence[tuple[int, float, int]]] = []
    for report in reports if chosen is None else [reports[place] for place in chosen]:
        turns = report.turns or ((report.num_sampled, report.reward, 0),)
        if report.status == "failed":
            turns = ((report.num_sampled, np.nan, 0),)
        elif (in_turns := sum(turn[0] for turn in turns)) != report.num_sampled:
            raise ValueError(
                f"a rollout of {report.prompt_id} has turns of {in_turns} sampled tokens, but {report.num_sampled} "
                "were sampled; for advantages by turn, a rollout program gives each Turn its num_sampled"
            )
        rows.append(turns)
    dtypes = (np.int64, np.float64, np.int64)
    return TurnColumns(
        *(Ragged.from_rows([[turn[i] for turn in row] for row in rows], dtype) for i, dtype in enumerate(dtypes))
    )
