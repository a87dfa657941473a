"""The pool of replicas that makes rollouts, and the source that a loop takes them from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol

import numpy as np

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
        conversations: Answers of the environment, by conversation, in order of their beginnings.
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
            again, and the environment's answers are given again if the conversation can continue after them
            (`AnsweredTurns.can_go_on`). Otherwise the environment takes its steps again; once it answers otherwise, or
            the program asks otherwise, the requests differ and further turns are sampled.
        num_demonstrated: Number of rollouts that take the prompt's demonstration instead of a completion, the last of
            the group. The other rollouts are the same as without them.
    """

    prompt: Prompt
    sampling: SamplingParams
    seeds: tuple[int, ...]
    is_urgent: bool = False
    turns: tuple[RolloutTurns, ...] = ()
    num_demonstrated: int = 0


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

    def next_done(self) -> tuple[Ticket, RolloutGroup]:
        """Wait for the next group that is finished, in order of their ends.

        Called at most as often as there are groups that were submitted and not taken.
        """

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

    def turns(self) -> Mapping[Ticket, tuple[RolloutTurns, ...]]:
        """Return the turns so far of the groups in progress, as `RolloutTask.turns` takes them; groups without any, and
        groups of a replica that does not answer, are left out.
        """

    @property
    def num_replicas(self) -> int:
        """Replicas that groups go to; it may change at every call."""

    def idle_share(self) -> float | None:
        """Return the share of the replicas' time since the last call without a rollout in progress; None if nothing was
        measured.
        """

    def speculation(self) -> SpeculationCounts | None:
        """Return the counts of speculative decoding since the last call, of all replicas that answer; None if they do
        without."""


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
        """Return the next groups, each prompt once; with weights at most the source's staleness old.

        Args:
            num_groups: Number of groups to return; fewer come at the end of the data.
            num_later: Groups that later steps will need, beyond which nothing is sampled ahead; None if that is not
                known.
        """

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected since the last `adopt` train nothing, and why."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the groups that were collected since the last `adopt`, by metric name."""

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights; trains nothing and moves no data position."""

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version, verified; raises `WeightSyncError` naming what did not arrive.

        The groups that were collected before count as trained, except those that were set aside.
        """

    def state(self) -> Mapping[str, Any]:
        """Return the data position and buffered rollouts as of the last `adopt`, to be saved with a checkpoint.

        Groups that were collected since then come again after `restore`, so that a step that collected and did not
        train (its data ended) loses no prompt.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    def close(self) -> None:
        """End everything that was started."""
