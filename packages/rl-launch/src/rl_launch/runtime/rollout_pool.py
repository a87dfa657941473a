"""All rollout workers of a run, each with its replica: groups go in, and come out as they are finished."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from rl_core.data.batch import RemoteRows
from rl_core.errors import FailureOrigin, GeneratorError, RLError, WorkerDied
from rl_core.ray.calls import fetch, outcomes, wait
from rl_core.ray.rows import refs_of, stored_groups
from rl_core.rollouts.generation import PauseMode
from rl_core.rollouts.group import GroupReport, RolloutGroup
from rl_core.rollouts.pool import RolloutTask, RolloutTurns, Ticket
from rl_core.rollouts.speculation import SpeculationCounts
from rl_core.weights import WeightUpdate
from rl_launch.placement.residency import TenantResidency
from rl_launch.run_session.stop import StepAbandoned
from rl_launch.runtime.elastic_replicas import ElasticReplicas
from rl_launch.runtime.opponents import WeightSender
from rl_launch.runtime.replica import FinishedCall, ProgressWatch, Replica, SpeculationWatch
from rl_launch.runtime.replica_group import ReplicaGroup
from rl_launch.runtime.replicas import EnvironmentWatch

_log = logging.getLogger(__name__)

MAX_ROLLOUTS = 1024
"""Maximum number of rollouts in progress on one of several replicas. An engine decodes about as many at a time; groups
that wait here instead of in its queue can go to the first replica that is free."""

FULL_CACHE = 0.95
"""Share of an engine's KV cache from which on requests that wait are taken to wait for the cache."""

DECREASE = 0.75
"""Factor of the number of rollouts in progress when a cache is full."""

INCREASE = 16
"""Number of rollouts that a report of a cache with room allows in addition."""

CHECK_PERIOD_S = 5.0
"""Maximum number of seconds between two checks of the replicas' progress."""

MORE_TIMEOUT_S, ALL_TIMEOUT_S = 0.03, 0.5
"""Seconds to wait for further finished groups of a replica that has just answered, and for those of all replicas."""

IDLE_TIMEOUT_S = 5.0
"""Timeout in seconds of a question to the replicas about their rollouts."""

TURNS_TIMEOUT_S = 60.0
"""Timeout in seconds of a question to the replicas for the turns of rollouts in progress."""

PROGRAM_TIMEOUT_S = 60.0
"""Timeout in seconds of a call of the rollout program."""

WRITE_TIMEOUT_S = 600.0
"""Timeout in seconds of writing the rollouts of a step."""


GroupListener = Callable[[RolloutGroup, int, int], None]
"""Called with a group that has ended, the time of its submission in nanoseconds since the epoch, and the number of its
replica."""


class ReplicaPool:
    """Runs groups on all replicas. Dead replicas are replaced, all get the current weights, and lost groups run again,
    each from the turns that its task has: only the dead process knew the later ones.

    With `elastic` the number of replicas changes during the run: it continues without replicas that die, and others
    join when weights are next sent.

    Its state belongs to the thread that calls it. Replicas continue to roll out between two calls. A restart, on
    shared devices with the policy offloaded, calls models, so it happens within a call, on the main thread.

    Args:
        replicas: Started, and on their devices.
        residency: Residency of devices that the replicas share with others; None if they share none.
        stall_timeout_s: Maximum time in seconds without progress for a replica that has work.
        weights: Sends weights to the replicas; None if they serve the weights that they have loaded.
        elastic: Replicas that join; None if there are always the same.

    Attributes:
        on_group: Called with every group that has ended; None if nobody listens.
        with_turns: Returns a group with the turns that it takes at a weight version; None if groups keep theirs.
        as_trained: Returns a finished group as it is trained on; None if groups stay as they are.
        is_asked_to_end: Returns True if a signal has requested the end of the run. The pool then does not wait for
            rollouts that agents elsewhere have not taken.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        residency: TenantResidency | None,
        *,
        stall_timeout_s: float,
        weights: WeightSender | None = None,
        elastic: ElasticReplicas | None = None,
        environments: EnvironmentWatch | None = None,
    ) -> None:
        self._group = ReplicaGroup(replicas, residency, weights=weights, elastic=elastic)
        self._dispatch = GroupDispatch()
        self._environments = environments
        self._stall_timeout_s = stall_timeout_s
        self._check_period_s = min(CHECK_PERIOD_S, stall_timeout_s / 4)
        self._watches: dict[Replica, ProgressWatch] = {}
        self._speculation = SpeculationWatch()
        self._done: deque[tuple[Ticket, RolloutGroup]] = deque()
        self._submitted_ns: dict[Ticket, int] = {}
        self.on_group: GroupListener | None = None
        self.with_turns: Callable[[RolloutTask, int], RolloutTask] | None = None
        self.as_trained: Callable[[RolloutGroup], RolloutGroup] | None = None
        self._version = 0
        self.is_asked_to_end: Callable[[], bool] = lambda: False

    def submit(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Roll out groups. They start in this order as the replicas have room.

        Raises:
            GeneratorError, WorkerDied: If replicas die again and again, with the cause.
        """
        if self.with_turns is not None:
            tasks = [self.with_turns(task, self._version) for task in tasks]
        tickets = self._dispatch.add(tasks)
        if self.on_group is not None:
            self._submitted_ns |= dict.fromkeys(tickets, time.time_ns())
        if tickets:
            self._begin()
        return tickets

    def next_done(self) -> tuple[Ticket, RolloutGroup]:
        """Return the next group that is finished; groups come in the order of their ends.

        Raises:
            GeneratorError, WorkerDied: If replicas die again and again, with the cause.
            StepAbandoned: If a signal has requested the end of the run, and nobody has taken some of the rollouts.
        """
        assert self._done or self._dispatch.num_groups, "every group that was submitted has been taken"
        while not self._done:
            self._begin()
            self._take_ended(self._check_period_s)
            self._check_progress(self._dispatch.busy)
            if self._environments is not None:
                self._environments.check()
            if not self._done and self.is_asked_to_end():
                busy = self._dispatch.busy - self._group.lost
                calls = [(each.origin("rollouts"), each.call("num_untaken")) for each in busy]
                if num_untaken := sum(_answers(calls, IDLE_TIMEOUT_S)):
                    raise StepAbandoned(f"{num_untaken} rollouts that no agent has taken")
        ticket, group = self._done.popleft()
        return ticket, group if self.as_trained is None else self.as_trained(group)

    def adopt(self, update: WeightUpdate, *, in_flight: bool = False) -> None:
        """Bring every replica to this version, verified, while groups are in progress: all replicas pause together, and
        rollouts continue after the update.

        Replicas that are restarted later get the same update, which must not be stale then. Groups of a replica that
        dies meanwhile run again.

        Args:
            update: Published weights to bring to the replicas.
            in_flight: True if completions in progress are interrupted and continue with the new weights, instead of
                being finished with the old ones first.

        Raises:
            WeightSyncError: If weights did not arrive, with their names.
            GeneratorError, WorkerDied: If replicas die again and again, with the cause.
        """
        self._version = update.version
        self._take_all_ended()
        with self._giving_up_restarted():
            self._pause("interrupt" if in_flight else "finish")
            self._group.adopt(update, in_flight=in_flight)
        if self._dispatch.num_groups:
            self._begin()

    def turns(self) -> dict[Ticket, tuple[RolloutTurns, ...]]:
        """Return the turns so far of the groups in progress, from which a later run resumes them. Groups without
        turns, and groups of a replica that does not respond, are left out.
        """
        replicas = self._dispatch.busy - self._group.lost
        calls = [(replica, replica.call("turns")) for replica in replicas]
        found: dict[Ticket, tuple[RolloutTurns, ...]] = {}
        for replica, call in calls:
            try:
                found |= fetch(call, replica.origin("turns of rollouts"), TURNS_TIMEOUT_S)
            except (GeneratorError, WorkerDied) as error:
                # The next call that needs a dead replica replaces it.
                _log.warning("%s; its rollouts start again if the run ends here", error)
        return found

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, including dead ones. Any thread can read it."""
        return tuple(self._group.replicas)

    @property
    def living_replicas(self) -> list[Replica]:
        """The replicas that groups go to."""
        lost = self._group.lost
        return [replica for replica in self._group.replicas if replica not in lost]

    @property
    def num_replicas(self) -> int:
        """Number of replicas that groups go to."""
        return len(self._group.replicas) - len(self._group.lost)

    def idle_share(self) -> float | None:
        """Return the share of the replicas' time since the last call, or since their first group, without a rollout in
        progress. Replicas that do not answer are left out; None if that is all of them.
        """
        calls = [(each.origin("idle time"), each.call("idle_time")) for each in self.living_replicas]
        times = _answers(calls, IDLE_TIMEOUT_S)
        idle_s, total_s = sum(idle for idle, _ in times), sum(total for _, total in times)
        return idle_s / total_s if total_s > 0 else None

    def speculation(self) -> SpeculationCounts | None:
        """Return the counts of speculative decoding since the last call, of all replicas that answer; None if they
        decode without it. Logs a warning when it begins to cost more than it saves.
        """
        return self._speculation.take(self.living_replicas)

    def call_program(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the rollout program in every rollout worker, and return the answers of those that are alive.

        Args:
            method: Name of the method.
            *args: Its arguments.
        """
        phase = f"program ({method})"
        calls = [(each.origin(phase), each.call("program", method, *args)) for each in self.living_replicas]
        return _answers(calls, PROGRAM_TIMEOUT_S)

    def write_rollouts(self, path: str, rows: RemoteRows, advantages: Sequence[float | None]) -> None:
        """Write the records of rollouts with a rollout worker, so that no strings are sent to this process. Any thread
        can call it.

        Args:
            path: Path of a new file in the run's folder, which all nodes see.
            rows: Rows of the records.
            advantages: Advantages of each rollout.

        Raises:
            WorkerDied: If the worker died, or strings were lost with a node.
        """
        replica = next(iter(self.living_replicas), None)
        if replica is None:
            raise WorkerDied("no rollout worker is alive that could write rollouts")
        call = replica.call("write_rollouts", path, rows.part, rows.row, advantages, *refs_of(rows))
        fetch(call, replica.origin("writing rollouts"), min(WRITE_TIMEOUT_S, self._stall_timeout_s))

    def close(self) -> None:
        """End all engines, then their processes."""
        if self._environments is not None:
            self._environments.finish()
        self._group.close()

    def _begin(self) -> None:
        """Start waiting groups. If the run cannot continue without replicas that died, the others finish their groups
        before all dead replicas are replaced together, and no group is started until then.
        """
        self._group.retire_lost()
        self._return_groups_of_removed()
        # Groups that a step left in progress cannot end while the weights are dropped.
        if not self._dispatch.busy or not self._group.has_weights:
            with self._giving_up_restarted():
                self._group.restart_lost()
        with self._group.hold():
            if self._group.is_whole:
                self._dispatch.assign_waiting(self._group.replicas)
        self._dispatch.poll_busy()
        timeout_s, period_s = self._stall_timeout_s, self._check_period_s
        self._watches = {
            each: self._watches.get(each) or ProgressWatch(each, timeout_s=timeout_s, period_s=period_s)
            for each in self._dispatch.busy
        }

    @contextmanager
    def _giving_up_restarted(self) -> Iterator[None]:
        """Return the groups of replicas that are restarted or removed meanwhile to the queue."""
        starts = {replica: replica.num_starts for replica in self._group.replicas}
        yield
        for replica, num_starts in starts.items():
            if replica.num_starts != num_starts:
                # Its calls belong to the process that died; their failures say nothing of its replacement.
                self._dispatch.give_up(replica)
                self._watches.pop(replica, None)
        self._return_groups_of_removed()

    def _return_groups_of_removed(self) -> None:
        """Let the groups of replicas that have left the group wait for another replica."""
        for replica in self._dispatch.busy - set(self._group.replicas):
            self._dispatch.give_up(replica)

    def _take_all_ended(self) -> None:
        """Take the groups that have ended, before replicas have other work. One that dies later would lose them, and
        one that begins further groups answers late."""
        timeout_s, deadline = 0.0, time.monotonic() + ALL_TIMEOUT_S
        while self._take_ended(timeout_s) and time.monotonic() < deadline:
            timeout_s = MORE_TIMEOUT_S

    def _take_ended(self, timeout_s: float) -> bool:
        """Wait for a finished group, at most for the timeout, and take what the replicas have answered by then. Return
        whether one has."""
        replicas = {call.reports: replica for replica, call in self._dispatch.asked.items()}
        if not replicas:
            return False
        ended = wait(list(replicas), timeout_s)
        origins = [replicas[ref].origin("rollouts") for ref in ended]
        for ref, origin, outcome in zip(ended, origins, outcomes(ended, origins), strict=True):
            replica = replicas[ref]
            call = self._dispatch.asked.pop(replica)
            if isinstance(outcome, GeneratorError | WorkerDied):
                self._fail(replica, outcome)
                self._dispatch.give_up(replica)
            elif isinstance(outcome, RLError):
                raise outcome
            else:
                self._take(replica, call, outcome, origin)
        # Replicas that answered continue to answer while these groups are taken.
        self._dispatch.poll_busy()
        return bool(ended)

    def _take(
        self, replica: Replica, call: FinishedCall, numbered: Sequence[tuple[int, GroupReport]], origin: FailureOrigin
    ) -> None:
        """Take the groups of one answer."""
        tickets = [Ticket(number) for number, _ in numbered]
        tasks = self._dispatch.end(replica, tickets)
        reports = [report for _, report in numbered]
        groups = stored_groups([task.prompt for task in tasks], reports, call.columns, call.records, origin)
        self._done.extend(zip(tickets, groups, strict=True))
        for ticket, group in zip(tickets, groups, strict=True):
            submitted_ns = self._submitted_ns.pop(ticket, None)
            if self.on_group is not None and submitted_ns is not None:
                self.on_group(group, submitted_ns, replica.index)
        self._watches[replica].note_progress()
        self._group.restart_budget.reset()

    def _pause(self, mode: PauseMode) -> None:
        """Wait until no replica has a completion in progress. This can take as long as the longest completion, so it
        happens before a transfer, whose timeout does not include it. A replica that makes no progress meanwhile is
        lost.
        """
        busy = self._dispatch.busy - self._group.lost
        pausing = {each.generator("pause", mode): each for each in self._group.replicas if each in busy}
        while pausing:
            ended = wait(list(pausing), self._check_period_s)
            origins = [pausing[ref].origin("pause") for ref in ended]
            for ref, outcome in zip(ended, outcomes(ended, origins), strict=True):
                replica = pausing.pop(ref)
                if isinstance(outcome, GeneratorError | WorkerDied):
                    self._fail(replica, outcome)
                elif isinstance(outcome, RLError):
                    raise outcome
            self._check_progress(pausing.values())

    def _check_progress(self, replicas: Collection[Replica]) -> None:
        for replica in set(replicas) - self._group.lost:
            try:
                health = self._watches[replica].check()
                if health is not None:
                    self._dispatch.observe(replica, health)
            except (GeneratorError, WorkerDied) as error:
                self._fail(replica, error)

    def _fail(self, replica: Replica, error: RLError) -> None:
        """Lose a replica; its other calls fail soon after it is killed."""
        self._group.fail(replica, error, num_groups=self._dispatch.num_under_way(replica))


def _answers(calls: Sequence[tuple[FailureOrigin, ray.ObjectRef]], timeout_s: float) -> list[Any]:
    """Return the answers of the replicas that are alive. The next call that needs a dead one replaces it."""
    end = time.monotonic() + timeout_s
    found = []
    for origin, call in calls:
        try:
            found.append(fetch(call, origin, max(0.0, end - time.monotonic())))
        except (GeneratorError, WorkerDied) as error:
            _log.debug("%s", error)
    return found


class RolloutLimit:
    """Maximum number of rollouts in progress on a replica: additive increase, multiplicative decrease.

    It falls when the engine preempts requests, whose keys and values are then computed again, or when requests wait
    because the KV cache is full. Rollouts in progress are not taken back, so it does not fall again before their number
    has reached it.
    """

    def __init__(self) -> None:
        self.value = MAX_ROLLOUTS
        self._num_preempted = 0

    def observe(self, health: Mapping[str, Any], num_rollouts: int) -> None:
        """Follow a report of the engine, as of `Generator.health`.

        Args:
            health: The report. Without figures of the cache the limit stays as it is.
            num_rollouts: Rollouts in progress on the replica.
        """
        before, self._num_preempted = self._num_preempted, health.get("num_preempted", 0)
        waits_for_cache = health.get("kv_cache_usage", 0.0) >= FULL_CACHE and health.get("num_waiting", 0) > 0
        if self._num_preempted > before or waits_for_cache:
            if num_rollouts <= self.value:
                self.value = max(1, int(DECREASE * num_rollouts))
        elif num_rollouts > self.value - INCREASE:
            self.value = min(MAX_ROLLOUTS, self.value + INCREASE)


class GroupDispatch:
    """Groups that wait for a replica or are in progress; a group goes to the replica with the fewest rollouts, unless
    that has reached its limit. Seeds do not depend on the replica, so the limits change no outcome.

    A replica gets all groups that it is assigned at once in one message and in order, so that on a single replica the
    engine's batches do not depend on timing.

    Attributes:
        asked: For each replica, its call for the groups that finish next.
    """

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._tasks: dict[Ticket, RolloutTask] = {}
        self._waiting: list[tuple[bool, Ticket]] = []
        self._load: Counter[Replica] = Counter()
        self._limits: defaultdict[Replica, RolloutLimit] = defaultdict(RolloutLimit)
        self._under_way: dict[Replica, set[Ticket]] = {}
        self.asked: dict[Replica, FinishedCall] = {}

    @property
    def num_groups(self) -> int:
        """Groups that are not finished."""
        return len(self._tasks)

    @property
    def busy(self) -> set[Replica]:
        """Replicas with groups in progress."""
        return set(self._under_way)

    def num_under_way(self, replica: Replica) -> int:
        """Return the number of groups that a replica has."""
        return len(self._under_way.get(replica, ()))

    def add(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Queue groups after the waiting ones; urgent groups after urgent ones."""
        numbered = {Ticket(next(self._tickets)): task for task in tasks}
        self._tasks |= numbered
        self._wait(numbered)
        return list(numbered)

    def assign_waiting(self, replicas: Sequence[Replica]) -> None:
        """Begin waiting groups on these replicas, urgent ones and then the oldest first, as far as there is room."""
        shares: dict[Replica, list[Ticket]] = {}
        while self._waiting:
            _, ticket = self._waiting[0]
            size = self._size(ticket)
            replica = min(replicas, key=self._load.__getitem__)
            if not self._has_room(replica, size, replicas):
                others = [each for each in replicas if self._has_room(each, size, replicas)]
                if not others:
                    break
                replica = min(others, key=self._load.__getitem__)
            heapq.heappop(self._waiting)
            shares.setdefault(replica, []).append(ticket)
            self._load[replica] += size
        for replica, tickets in shares.items():
            replica.begin([(ticket, self._tasks[ticket]) for ticket in tickets])
            self._under_way.setdefault(replica, set()).update(tickets)

    def observe(self, replica: Replica, health: Mapping[str, Any]) -> None:
        """Let the number of rollouts on a replica follow the load that its engine reports."""
        limit = self._limits[replica]
        before = limit.value
        limit.observe(health, self._load[replica])
        if limit.value < before:
            _log.info("%s has no free KV cache: it gets at most %d rollouts at a time", replica, limit.value)

    def poll_busy(self) -> None:
        """Ask every replica with groups in progress for the groups that finish next, unless it has been asked."""
        for replica in self._under_way:
            if replica not in self.asked:
                self.asked[replica] = replica.finished()

    def end(self, replica: Replica, tickets: Sequence[Ticket]) -> list[RolloutTask]:
        """Take finished groups off their replica; return their tasks."""
        self._under_way[replica] -= set(tickets)
        self._load[replica] -= sum(map(self._size, tickets))
        if not self._under_way[replica]:
            del self._under_way[replica]
        return [self._tasks.pop(ticket) for ticket in tickets]

    def give_up(self, replica: Replica) -> None:
        """Return all groups of a replica to the queue, before groups that were added later; its call for finished ones
        is answered no longer.
        """
        self.asked.pop(replica, None)
        self._limits.pop(replica, None)
        del self._load[replica]
        self._wait(self._under_way.pop(replica, ()))

    def _has_room(self, replica: Replica, size: int, replicas: Sequence[Replica]) -> bool:
        """Return whether a replica may begin so many more rollouts. An idle one always may, and a single one gets all
        groups at once unless its engine has reported a full cache.
        """
        load, limit = self._load[replica], self._limits[replica].value
        return not load or load + size <= limit or (len(replicas) == 1 and limit == MAX_ROLLOUTS)

    def _wait(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            heapq.heappush(self._waiting, (not self._tasks[ticket].is_urgent, ticket))

    def _size(self, ticket: Ticket) -> int:
        return len(self._tasks[ticket].seeds)
