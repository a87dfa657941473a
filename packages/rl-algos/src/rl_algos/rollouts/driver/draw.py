"""The state of a prompt from its draw until it is trained or set aside, and the choice of the draws of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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
    """The draws of the next batch.

    Args:
        due: Draws that the batch waits for.
        candidates: Draws of one version; the batch takes those that finish first, in order.
        num_candidates: Number of candidates that it takes.
    """

    due: tuple[int, ...]
    candidates: tuple[int, ...]
    num_candidates: int

    def select(self, finished: Collection[int]) -> list[int] | None:
        """Return the draws of the batch in order once enough of them are finished; None before."""
        if not all(draw in finished for draw in self.due):
            return None
        ready = [draw for draw in self.candidates if draw in finished]
        return sorted([*self.due, *ready[: self.num_candidates]]) if len(ready) >= self.num_candidates else None


def plan_batch(begun_at: Mapping[int, int], num_groups: int) -> BatchPlan:
    """Return which draws the next batch takes: the oldest first, by the version that they began with.

    A batch waits for a slow group only when it is due. It may need only a part of the newest version that it takes;
    then it takes the groups of this version that finish first.

    >>> begun_at = {3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 3}  # version that each draw began with
    >>> plan = plan_batch(begun_at, 4)  # 4 groups: both of version 1, and 2 of the 3 of version 2
    >>> plan
    BatchPlan(due=(3, 4), candidates=(5, 6, 7), num_candidates=2)
    >>> plan.select({4, 5, 7})  # waits: 3 is due
    >>> plan.select({3, 4, 7, 8})  # waits: one more of 5, 6 and 7; 8 belongs to a later batch
    >>> plan.select({3, 4, 5, 7})
    [3, 4, 5, 7]

    Args:
        begun_at: Version that each unfinished or finished draw began with, by number.
        num_groups: Maximum number of groups of the batch; it has fewer at the end of the data.
    """
    oldest_first = sorted(begun_at, key=lambda draw: (begun_at[draw], draw))
    wanted = oldest_first[:num_groups]
    if not wanted:
        return BatchPlan((), (), 0)
    newest = begun_at[wanted[-1]]
    due = tuple(draw for draw in wanted if begun_at[draw] < newest)
    candidates = tuple(draw for draw in oldest_first if begun_at[draw] == newest)
    return BatchPlan(due, candidates, len(wanted) - len(due))
