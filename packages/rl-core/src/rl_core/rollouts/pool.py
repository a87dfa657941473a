"""The pool of replicas that makes rollouts, as a driver sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Completion, Prompt
from rl_core.rollouts.speculation import SpeculationCounts
from rl_core.weights import WeightUpdate

Ticket = NewType("Ticket", int)
"""Identifies a group from `RolloutPool.submit` until it is finished; later ones are larger."""


@dataclass(frozen=True)
class AnsweredTurns:
    """Answers of an environment to one conversation, in order.

    Args:
        digests: Digests of the turns that were answered, at least one.
        results: The answers. Of their states only the last may be saved.
    """

    digests: tuple[str, ...]
    results: tuple[StepResult, ...]

    @property
    def can_go_on(self) -> bool:
        """Return whether nothing but these answers is needed to continue: the conversation has ended, or its state is
        saved, or it has none."""
        last = self.results[-1]
        return last.done or last.state is None or last.state.saved is not None


@dataclass(frozen=True)
class RolloutTurns:
    """The turns of a rollout so far.

    Args:
        completions: Completions by the digests of their requests (`GenerationRequest.digest`).
        conversations: Answers of the environment, by conversation in the order in which they began.
    """

    completions: Mapping[str, Completion] = field(default_factory=dict)
    conversations: tuple[AnsweredTurns, ...] = ()


@dataclass(frozen=True)
class RolloutTask:
    """A group to roll out.

    Args:
        prompt: The prompt to start from.
        sampling: How completions are drawn.
        seeds: One per rollout of the group.
        is_urgent: True if it begins before groups that wait and are not, such as those of later steps.
        turns: Turns of an earlier run of each rollout; empty if there was none. Their completions are not sampled
            again, and the environment's answers are given again if the conversation can go on behind them
            (`AnsweredTurns.can_go_on`). Otherwise the environment takes its steps again; once it answers otherwise, or
            the program asks otherwise, the requests differ and further turns are sampled.
    """

    prompt: Prompt
    sampling: SamplingParams
    seeds: tuple[int, ...]
    is_urgent: bool = False
    turns: tuple[RolloutTurns, ...] = ()


class RolloutPool(Protocol):
    """All rollout workers of a run, called as one, by one thread.

    Each group goes to the replica that has the least to do. A replica that dies is restarted and given the current
    weights; the groups that it had under way run again, and no others.

    The usage loop::

        tickets = pool.submit(tasks)
        for _ in tickets:
            ticket, group = pool.next_done()
    """

    def submit(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Start the rollouts of groups, in this order as the replicas have room, urgent ones first; a ticket for each.

        Groups that are submitted together and begin on an idle replica reach its engine together and in order. More
        may be submitted while others are under way.
        """
        ...

    def next_done(self) -> tuple[Ticket, RolloutGroup]:
        """Wait for the next group that is finished, in the order in which they end.

        Called at most as often as there are groups that were submitted and not taken.
        """
        ...

    def adopt(self, update: WeightUpdate, *, in_flight: bool = False) -> None:
        """Bring every replica to this version, verified. Groups under way continue, between two of their turns or
        within one.

        Args:
            update: Published version that the replicas load.
            in_flight: True if completions under way are interrupted and continue with the new weights, instead of being
                finished with the old ones first.

        Raises:
            WeightSyncError: If the update is stale, or naming what did not arrive; nothing is served then.
        """
        ...

    def turns(self) -> Mapping[Ticket, tuple[RolloutTurns, ...]]:
        """Turns so far of the groups that are under way, as `RolloutTask.turns` takes them; groups without any,
        and those of a replica that does not answer, are left out.
        """
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that groups go to; it may change at every call."""
        ...

    def idle_share(self) -> float | None:
        """Share of the replicas' time since the last call in which they had no rollout under way; None if nothing was
        measured.
        """
        ...

    def speculation(self) -> SpeculationCounts | None:
        """Counts of speculative decoding since the last call, of all replicas that answer; None if they do without."""
        ...
