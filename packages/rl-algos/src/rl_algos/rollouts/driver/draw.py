"""The state of a prompt from its draw until it is trained or set aside, and the choice of the draws of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rl_algos.rollouts.config import Sampler
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Prompt


class DrawState(Enum):
    """State of a draw in a source of rollouts.

    ============  =========================================  ============
    from          event                                      to
    ============  =========================================  ============
    (new)         drawn from the stream of prompts           WAITING
    WAITING       `begin`: handed to the pool                UNDER_WAY
    UNDER_WAY     `finish`: the pool returned its group      FINISHED
    FINISHED      `collect`: a step took its group           COLLECTED
    COLLECTED     `set_aside`: the step doesn't train on it  SET_ASIDE
    COLLECTED     the step has trained                       (leaves)
    SET_ASIDE     the step has trained                       (leaves)
    ============  =========================================  ============

    A checkpoint adds these:

    ============  =========================================  ============
    WAITING       `restore_turns`: it was under way          RESTORED
    WAITING       `restore_group`: it was finished           FINISHED
    RESTORED      `begin`: continues from its turns          UNDER_WAY
    RESTORED      `discard`: older than the staleness bound  WAITING
    FINISHED      `discard`: older than the staleness bound  WAITING
    ============  =========================================  ============

    Draws that were collected or set aside when a checkpoint was saved are WAITING after it is restored.
    """

    WAITING = "waiting"
    RESTORED = "restored"
    UNDER_WAY = "under way"
    FINISHED = "finished"
    COLLECTED = "collected"
    SET_ASIDE = "set aside"


NOT_BEGUN = -1
"""Weight version of a draw that is WAITING."""


@dataclass(eq=False)
class Draw:
    """A prompt that was drawn and has not left.

    Args:
        number: Number of the draw, from 0 in the order the prompts were taken.
        prompt: The prompt.

    Attributes:
        state: The state; only the methods of this class change it.
        begun_at: Newest weight version when its rollouts first began: the oldest that their tokens can have.
        turns: Turns of an earlier run of its rollouts, to continue.
        reason: Reason that nothing trains on it, once it is SET_ASIDE.
    """

    number: int
    prompt: Prompt
    state: DrawState = DrawState.WAITING
    begun_at: int = NOT_BEGUN
    turns: tuple[RolloutTurns, ...] = ()
    reason: str = ""
    _group: RolloutGroup | None = None

    @property
    def group(self) -> RolloutGroup:
        """Its rollouts, once they are finished."""
        assert self._group is not None, f"the rollouts of {self.prompt} are {self.state.value}, not finished"
        return self._group

    @property
    def is_collected(self) -> bool:
        """Return True if a step has taken its group."""
        return self.state in (DrawState.COLLECTED, DrawState.SET_ASIDE)

    def begin(self, version: int) -> None:
        """Note that the pool has it. The age of a restored draw counts from the begin of its first run."""
        if self.state is not DrawState.RESTORED:
            self.begun_at = version
        self._enter(DrawState.UNDER_WAY, DrawState.WAITING, DrawState.RESTORED)

    def finish(self, group: RolloutGroup) -> None:
        """Take the rollouts from the pool."""
        self._enter(DrawState.FINISHED, DrawState.UNDER_WAY)
        self._group = group

    def collect(self) -> RolloutGroup:
        """Give the rollouts to a step."""
        self._enter(DrawState.COLLECTED, DrawState.FINISHED)
        return self.group

    def set_aside(self, reason: str) -> None:
        """Note that the step that collected it does not train on it."""
        self._enter(DrawState.SET_ASIDE, DrawState.COLLECTED)
        self.reason = reason

    def restore_turns(self, version: int, turns: tuple[RolloutTurns, ...]) -> None:
        """Take the turns of a checkpoint, and the version that their rollouts began with."""
        self._enter(DrawState.RESTORED, DrawState.WAITING)
        self.begun_at, self.turns = version, turns

    def restore_group(self, version: int, group: RolloutGroup) -> None:
        """Take the finished rollouts of a checkpoint, and the version that they began with."""
        self._enter(DrawState.FINISHED, DrawState.WAITING)
        self.begun_at, self._group = version, group

    def discard(self) -> None:
        """Drop the turns or the group of a checkpoint; all rollouts are sampled again."""
        self._enter(DrawState.WAITING, DrawState.RESTORED, DrawState.FINISHED)
        self.begun_at, self.turns, self._group = NOT_BEGUN, (), None

    def _enter(self, state: DrawState, *allowed: DrawState) -> None:
        assert self.state in allowed, f"draw {self.number} is {self.state.value}: it cannot become {state.value}"
        self.state = state


class BatchPlan(NamedTuple):
    """The draws that the next batch may take.

    Args:
        quotas: Draws to choose from, and the number of draws that the batch has once it has chosen from them too. The
            batch takes those that are finished, in the order of the quota.
    """

    quotas: tuple[tuple[tuple[int, ...], int], ...]

    def select(self, finished: Collection[int]) -> list[int] | None:
        """Return the draws of the batch in order once enough of them are finished; None before."""
        chosen: set[int] = set()
        for draws, count in self.quotas:
            num_spare = len(chosen) + len(draws) - count
            for draw in draws:
                if len(chosen) == count:
                    break
                if draw in finished:
                    chosen.add(draw)
                elif (num_spare := num_spare - 1) < 0:
                    return None
            if len(chosen) < count:
                return None
        return sorted(chosen)


@dataclass(frozen=True)
class BatchRule:
    """Which draws a batch takes, such that no group becomes older than the staleness bound.

    A group that begins at version v is due in the step that trains version v + `max_staleness`. Every step trains on
    `prompts_per_step` groups, so a batch must take groups early if more are due in later steps than these can take:
    of the groups that are due within the next j steps, all but `j * prompts_per_step`. At most
    `(max_staleness + 1) * prompts_per_step` groups are unfinished or finished, so these quotas fit into each batch.
    `sampler` decides about the rest.

    Args:
        sampler: See `rl_algos.rollouts.config.AsyncConfig.sampler`.
        max_staleness: Maximum number of weight versions between the start of a group and its training.
        prompts_per_step: Groups that a step trains on.
        window: Number of groups that `windowed` chooses from, the first ones in the order they were drawn.
    """

    sampler: Sampler = "weight_fifo"
    max_staleness: int = 0
    prompts_per_step: int = 0
    window: int = 0

    def plan(self, begun_at: Mapping[int, int], num_groups: int, version: int) -> BatchPlan:
        """Return the plan of the next batch.

        >>> begun_at = {3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 3}  # version that each draw began with
        >>> plan = BatchRule("weight_fifo", 2, 2).plan(begun_at, 4, version=3)
        >>> plan.quotas  # both draws of version 1, and 2 of the 3 draws of version 2
        (((3, 4), 2), ((5, 6, 7), 4))
        >>> plan.select({4, 5, 7})  # waits: 3 is due
        >>> plan.select({3, 4, 7, 8})  # waits: one more of 5, 6 and 7; 8 belongs to a later batch
        >>> plan.select({3, 4, 5, 7})
        [3, 4, 5, 7]
        >>> plan = BatchRule("ready_first", 3, 2).plan(begun_at, 2, version=3)
        >>> plan.quotas  # of the 5 draws that are due in step 5 at the latest, steps 4 and 5 can take only 4
        (((3, 4, 5, 6, 7), 1), ((3, 4, 5, 6, 7, 8), 2))
        >>> plan.select({6, 8})
        [6, 8]

        Args:
            begun_at: Version that each unfinished or finished draw began with, by number.
            num_groups: Maximum number of groups of the batch; it has fewer at the end of the data.
            version: Version of the weights that train on the batch.
        """
        oldest_first = sorted(begun_at, key=lambda draw: (begun_at[draw], draw))
        count = min(num_groups, len(oldest_first))
        if self.sampler == "weight_fifo":
            # The oldest versions, which meets the bound by itself; of the newest one, the draws that finish first.
            newest = begun_at[oldest_first[count - 1]] if count else 0
            older = tuple(draw for draw in oldest_first if begun_at[draw] < newest)
            same = tuple(draw for draw in oldest_first if begun_at[draw] == newest)
            return BatchPlan((*([(older, len(older))] if older else []), (same, count)))
        quotas: list[tuple[tuple[int, ...], int]] = []
        for steps in range(self.max_staleness):
            due = tuple(draw for draw in oldest_first if begun_at[draw] <= version - self.max_staleness + steps)
            required = min(count, len(due) - steps * self.prompts_per_step)
            if required > (quotas[-1][1] if quotas else 0):
                quotas.append((due, required))
        by_number = tuple(sorted(begun_at))
        match self.sampler:
            case "in_order":
                # Finished or not, the batch is these draws, so timing decides nothing.
                fixed = BatchPlan((*quotas, (by_number, count))).select(begun_at)
                return BatchPlan(((tuple(fixed or ()), count),))
            case "windowed":
                return BatchPlan((*quotas, (by_number[: max(self.window, count)], count)))
            case _:
                return BatchPlan((*quotas, (tuple(oldest_first), count)))
