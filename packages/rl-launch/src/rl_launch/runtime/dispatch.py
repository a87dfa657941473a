"""Assigns groups to replicas."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from rl_core.rollouts.pool import RolloutTask, Ticket
from rl_launch.runtime.replica import FinishedCall, Replica

MOST_ROLLOUTS = 1024
"""Maximum number of rollouts in progress on one of several replicas. An engine decodes about as many at a time; groups
that wait here instead of in its queue can go to the first replica that is free."""


class Dispatch:
    """Groups that wait for a replica, and those under way; a group goes to the replica with the fewest rollouts.

    A replica gets all groups that it is assigned at once in one message and in order, so that on a single replica the
    engine's batches do not depend on timing.

    Args:
        replicas: Replicas in order.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        self._tickets = itertools.count()
        self._tasks: dict[Ticket, RolloutTask] = {}
        self._waiting: list[tuple[bool, Ticket]] = []
        self._load = dict.fromkeys(self._replicas, 0)
        self._under_way: dict[Replica, set[Ticket]] = {replica: set() for replica in self._replicas}
        self.asked: dict[Replica, FinishedCall] = {}

    @property
    def num_groups(self) -> int:
        """Groups that are not finished."""
        return len(self._tasks)

    @property
    def busy(self) -> set[Replica]:
        """Replicas with groups under way."""
        return {replica for replica, tickets in self._under_way.items() if tickets}

    def add_replica(self, replica: Replica) -> None:
        """Add a replica for groups."""
        self._replicas.append(replica)
        self._load[replica] = 0
        self._under_way[replica] = set()

    def remove_replica(self, replica: Replica) -> None:
        """Remove a replica and return its groups to the queue."""
        self.give_up(replica)
        self._replicas.remove(replica)
        del self._load[replica], self._under_way[replica]

    @property
    def replicas(self) -> list[Replica]:
        """Replicas that groups go to."""
        return list(self._replicas)

    def num_under_way(self, replica: Replica) -> int:
        """Groups that a replica has."""
        return len(self._under_way[replica])

    def add(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Queue groups after the waiting ones; urgent groups after urgent ones."""
        numbered = {Ticket(next(self._tickets)): task for task in tasks}
        self._tasks |= numbered
        self._wait(numbered)
        return list(numbered)

    def assign_waiting(self) -> None:
        """Begin waiting groups, urgent ones and then the oldest first, as far as the replicas have room."""
        shares: dict[Replica, list[Ticket]] = {}
        while self._waiting:
            replica = min(self._replicas, key=self._load.__getitem__)
            _, ticket = self._waiting[0]
            size = self._size(ticket)
            if len(self._replicas) > 1 and self._load[replica] and self._load[replica] + size > MOST_ROLLOUTS:
                break
            heapq.heappop(self._waiting)
            shares.setdefault(replica, []).append(ticket)
            self._load[replica] += size
        for replica, tickets in shares.items():
            replica.begin([(ticket, self._tasks[ticket]) for ticket in tickets])
            self._under_way[replica] |= set(tickets)

    def poll_busy(self) -> None:
        """Ask every replica that has groups under way for those that finish next, unless it has been asked."""
        for replica in self._replicas:
            if self._under_way[replica] and replica not in self.asked:
                self.asked[replica] = replica.finished()

    def end(self, replica: Replica, tickets: Sequence[Ticket]) -> list[RolloutTask]:
        """Take finished groups off their replica; returns their tasks."""
        self._take_off(replica, tickets)
        return [self._tasks.pop(ticket) for ticket in tickets]

    def give_up(self, replica: Replica) -> None:
        """Return all groups of a replica to the queue, before those that were added later; its call for finished ones
        is answered no longer.
        """
        self.asked.pop(replica, None)
        tickets = list(self._under_way[replica])
        self._take_off(replica, tickets)
        self._wait(tickets)

    def _wait(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            heapq.heappush(self._waiting, (not self._tasks[ticket].is_urgent, ticket))

    def _take_off(self, replica: Replica, tickets: Sequence[Ticket]) -> None:
        self._under_way[replica] -= set(tickets)
        self._load[replica] -= sum(map(self._size, tickets))

    def _size(self, ticket: Ticket) -> int:
        return len(self._tasks[ticket].seeds)
