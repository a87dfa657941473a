"""Which replica runs which group."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from rl_core.generation import RolloutTask, Ticket
from rl_launch.runtime.replica import GroupCall, Replica

MOST_ROLLOUTS = 1024
"""Rollouts under way on one replica of several. An engine decodes about as many at a time; what waits here rather than
in its queue can go to whichever replica is free first."""

MOST_GROUPS = 5000
"""Groups under way on one replica: half of the calls that its process takes at a time."""


@dataclass(frozen=True)
class Begun:
    """A group under way.

    Args:
        ticket, task: of the group.
        replica: that runs it.
        call: that is answered with it.
    """

    ticket: Ticket
    task: RolloutTask
    replica: Replica
    call: GroupCall


class Dispatch:
    """Groups that wait for a replica, and those under way; a group goes to the replica with the fewest rollouts.

    A replica gets all groups that it is dealt at once in one message and in order, so that on a single replica the
    engine's batches do not depend on timing.

    Args:
        replicas: in order.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        self._tickets = itertools.count()
        self._tasks: dict[Ticket, RolloutTask] = {}
        self._waiting: list[Ticket] = []
        self._load = dict.fromkeys(self._replicas, 0)
        self.under_way: dict[ray.ObjectRef, Begun] = {}

    @property
    def num_groups(self) -> int:
        """Groups that are not finished."""
        return len(self._tasks)

    @property
    def busy(self) -> set[Replica]:
        """Replicas with groups under way."""
        return {replica for replica, load in self._load.items() if load}

    def add(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Have groups wait behind those that wait already."""
        numbered = {Ticket(next(self._tickets)): task for task in tasks}
        self._tasks |= numbered
        for ticket in numbered:
            heapq.heappush(self._waiting, ticket)
        return list(numbered)

    def deal(self) -> None:
        """Begin waiting groups, the oldest first, as far as the replicas have room."""
        shares: dict[Replica, list[Ticket]] = {}
        room = MOST_GROUPS * len(self._replicas) - len(self.under_way)
        while self._waiting and room > 0:
            replica = min(self._replicas, key=self._load.__getitem__)
            size = len(self._tasks[self._waiting[0]].seeds)
            if len(self._replicas) > 1 and self._load[replica] and self._load[replica] + size > MOST_ROLLOUTS:
                break
            shares.setdefault(replica, []).append(heapq.heappop(self._waiting))
            self._load[replica] += size
            room -= 1
        for replica, tickets in shares.items():
            calls = replica.begin([(ticket, self._tasks[ticket]) for ticket in tickets])
            for number, call in calls.items():
                ticket = Ticket(number)
                self.under_way[call.report] = Begun(ticket, self._tasks[ticket], replica, call)

    def end(self, ref: ray.ObjectRef, *, again: bool = False) -> None:
        """Take a group off its replica: it is finished, or waits `again`, before all that were added later."""
        begun = self.under_way.pop(ref)
        self._load[begun.replica] -= len(begun.task.seeds)
        if again:
            heapq.heappush(self._waiting, begun.ticket)
        else:
            del self._tasks[begun.ticket]
