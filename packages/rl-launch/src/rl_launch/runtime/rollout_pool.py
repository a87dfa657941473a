"""All rollout workers of a run, each with its replica: sharing out groups, and replacing what dies."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import ray

from rl_core.errors import GeneratorError, RLError, WorkerDied, WorkerStalled
from rl_core.generation import RolloutTask, WeightUpdate
from rl_core.ray.calls import fetch, wait
from rl_core.rollout import RolloutGroup
from rl_launch.placement.residency import Residency, Tenant
from rl_launch.placement.topology import GENERATION
from rl_launch.runtime.replica import ROLE, ProgressWatch, Replica

_log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Deaths of replicas in a row, without a finished group between them, before the run fails."""

MOST_ROLLOUTS = 1024
"""Rollouts under way on one replica of several. An engine decodes about as many at a time; what waits here rather than
in its queue can go to whichever replica is free first."""

MOST_GROUPS = 5000
"""Groups under way on one replica: half of the calls that its process takes at a time."""

HEALTH_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 600.0
"""Bound of leaving a device and of coming back."""

LOOK_S = 5.0
"""Longest time between two looks at the replicas' progress."""


class RolloutPool:
    """Runs tasks on all replicas; dead ones are restarted, all get the current weights, and what is missing runs again.

    A group goes to the replica with the fewest rollouts under way. A replica gets its first groups in one message and
    in order, so that on a single replica the engine's batches do not depend on timing.

    Args:
        replicas: started, and on their devices.
        residency: of devices that the replicas share with others; None if they share none.
        stall_timeout_s: for which a replica that has work may make no progress.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        residency: Residency | None,
        *,
        stall_timeout_s: float,
    ) -> None:
        self._replicas = list(replicas)
        self._residency = residency
        self._stall_timeout_s = stall_timeout_s
        self._update: WeightUpdate | None = None
        self._lost: dict[Replica, RLError] = {}
        self._has_weights = True
        self._deaths = Deaths()
        self._numbers = itertools.count()
        if residency is not None:
            self.sleep()
            residency.join(GENERATION, Tenant(self.sleep, self.wake))

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutGroup]:
        """One group per task, in order.

        Raises:
            GeneratorError, WorkerDied: if replicas die again and again, with the cause.
        """
        groups: dict[int, RolloutGroup] = {}
        while len(groups) < len(tasks):
            if self._lost or not self._has_weights:
                self._bring(self._update)
            with self._hold():
                if self._lost:
                    continue
                missing = {index: task for index, task in enumerate(tasks) if index not in groups}
                groups |= self._roll_out(missing)
        return [groups[index] for index in range(len(tasks))]

    def adopt(self, update: WeightUpdate) -> None:
        """Bring every replica to this version, verified.

        Those that are restarted later get the same update, which must not be stale then.
        """
        self._bring(update)

    def sleep(self) -> None:
        """Have the replicas leave their devices; one that died meanwhile is replaced before it is needed."""
        kept = self._on_all("sleep")
        self._has_weights = self._has_weights and all(kept)

    def wake(self) -> None:
        """Have the replicas come back to their devices."""
        self._on_all("wake")

    def close(self) -> None:
        """End all engines, then their processes."""
        closing = [(replica, replica.call("close")) for replica in self._replicas]
        for replica, ref in closing:
            try:
                fetch(ref, replica.origin("close"), HEALTH_TIMEOUT_S)
            except RLError as error:
                _log.warning("%s", error)
        for replica in self._replicas:
            replica.kill()

    def _hold(self) -> AbstractContextManager[None]:
        return self._residency.hold(GENERATION) if self._residency else nullcontext()

    def _on_all(self, method: str) -> list[bool]:
        living = [replica for replica in self._replicas if replica not in self._lost]
        calls = [(replica, replica.generator(method)) for replica in living]
        answers = []
        for replica, ref in calls:
            try:
                answers.append(fetch(ref, replica.origin(method), TURN_TIMEOUT_S))
            except (GeneratorError, WorkerDied) as error:
                self._lose(replica, _located(error, replica, method))
        return answers

    def _roll_out(self, tasks: Mapping[int, RolloutTask]) -> dict[int, RolloutGroup]:
        """Groups by their index. After a death the others finish what they have, and nothing new is begun."""
        work = Work(tasks, self._replicas)
        look_s = min(LOOK_S, self._stall_timeout_s / 4)
        watches = {
            replica: ProgressWatch(replica, timeout_s=self._stall_timeout_s, period_s=look_s)
            for replica in self._replicas
        }
        groups: dict[int, RolloutGroup] = {}
        while True:
            if not self._lost:
                work.deal(self._numbers)
            if not work.under_way:
                return groups
            for ref in wait(list(work.under_way), look_s):
                replica, index = work.under_way.pop(ref)
                work.load[replica] -= len(tasks[index].seeds)
                try:
                    groups[index] = fetch(ref, replica.origin("rollouts"))
                except (GeneratorError, WorkerDied) as error:
                    self._fail(replica, error, work)
                else:
                    watches[replica].moved()
                    self._deaths.forget()
            for replica in {replica for replica, _ in work.under_way.values()} - set(self._lost):
                try:
                    watches[replica].look()
                except (GeneratorError, WorkerDied) as error:
                    self._fail(replica, error, work)

    def _fail(self, replica: Replica, error: RLError, work: Work) -> None:
        """Lose a replica whose call failed, unless that is known already; its other calls fail soon after it is killed.

        Raises:
            GeneratorError: if the replica is well and will not do what it was asked: it would refuse again.
        """
        if replica in self._lost:
            return
        located = _located(error, replica, "rollouts")
        if isinstance(error, GeneratorError) and not self._ill([replica]):
            raise located
        num_lost = 1 + sum(other is replica for other, _ in work.under_way.values())
        _log.warning("%s; restarting it and running what it had under way again (%d groups)", located, num_lost)
        if isinstance(error, WorkerStalled):
            replica.write_stacks()
        self._lose(replica, located)

    def _lose(self, replica: Replica, error: RLError) -> None:
        """Give a replica up until it is replaced."""
        replica.kill()
        self._lost[replica] = error

    def _bring(self, update: WeightUpdate | None) -> None:
        """Replace what was lost, and bring every replica to this version, if there is one.

        Raises:
            GeneratorError, WorkerDied: with the cause, if replicas have died too often.
        """
        while True:
            if self._lost:
                # once for all that were lost together
                self._deaths.note(next(iter(self._lost.values())))
            try:
                self._replace_lost()
                if update is not None:
                    update.send(self._replicas)
                    self._update = update
                self._has_weights = True
                return
            except (GeneratorError, WorkerDied) as error:
                living = [replica for replica in self._replicas if replica not in self._lost]
                ill = self._ill(living)
                dead = [replica for replica in living if replica in ill or _is_at(error, replica)]
                if not dead and not self._lost:
                    raise
                version = "" if update is None else f" of version {update.version}"
                _log.warning("weight sync%s broke off: %s", version, error)
                for replica in dead:
                    self._lose(replica, error)

    def _replace_lost(self) -> None:
        """Start lost replicas anew, all at once; on shared devices nobody else is there meanwhile."""
        if not self._lost:
            return
        if self._residency is not None:
            self._residency.vacate()
        for replica in self._lost:
            replica.kill()
        starts = [(replica, replica.begin_start()) for replica in self._lost]
        failures: dict[Replica, RLError] = {}
        for replica, finish in starts:
            try:
                finish()
                if self._residency is not None:
                    fetch(replica.generator("sleep"), replica.origin("sleep"), TURN_TIMEOUT_S)
            except (GeneratorError, WorkerDied) as error:
                failures[replica] = _located(error, replica, "start")
        self._lost = failures
        if failures:
            raise next(iter(failures.values()))

    def _ill(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Those that do not answer, or whose engine is dead."""
        ill = []
        for replica, ref in [(replica, replica.call("health")) for replica in replicas]:
            try:
                fetch(ref, replica.origin("health"), HEALTH_TIMEOUT_S)
            except RLError:
                ill.append(replica)
        return ill


@dataclass
class Work:
    """Groups that wait for a replica, and those under way.

    Args:
        tasks: by index.
        replicas: in order.
    """

    tasks: Mapping[int, RolloutTask]
    replicas: Sequence[Replica]
    under_way: dict[ray.ObjectRef, tuple[Replica, int]] = field(default_factory=dict)
    load: dict[Replica, int] = field(init=False)
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.load = dict.fromkeys(self.replicas, 0)
        self.waiting = deque(sorted(self.tasks))

    def deal(self, numbers: itertools.count[int]) -> None:
        """Begin waiting groups in order, each on the replica with the fewest rollouts, as far as there is room."""
        shares: dict[Replica, list[int]] = {}
        room = MOST_GROUPS * len(self.replicas) - len(self.under_way)
        while self.waiting and room > 0:
            replica = min(self.replicas, key=self.load.__getitem__)
            size = len(self.tasks[self.waiting[0]].seeds)
            if len(self.replicas) > 1 and self.load[replica] and self.load[replica] + size > MOST_ROLLOUTS:
                break
            shares.setdefault(replica, []).append(self.waiting.popleft())
            self.load[replica] += size
            room -= 1
        for replica, indices in shares.items():
            by_number = {next(numbers): index for index in indices}
            refs = replica.begin([(number, self.tasks[index]) for number, index in by_number.items()])
            self.under_way |= {ref: (replica, by_number[number]) for number, ref in refs.items()}


class Deaths:
    """Decides when replicas have died often enough for the run to fail, with the cause."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last = ""
        self._has_finished_any = False

    def forget(self) -> None:
        """Note that a group was finished."""
        self._in_a_row = 0
        self._has_finished_any = True

    def note(self, error: RLError) -> None:
        """Count a death, or several at once.

        Raises:
            RLError: the error, if an engine has died twice in this way before it finished anything, if a process does
                not start at all, or after too many deaths in a row.
        """
        self._in_a_row += 1
        cause, self._last = self._last, _cause(error)
        if isinstance(error, WorkerStalled) and error.origin is not None and error.origin.phase == "start":
            raise error
        if isinstance(error, GeneratorError) and not self._has_finished_any and cause == self._last:
            raise error
        if self._in_a_row < MOST_DEATHS:
            return
        said = f"replicas died {self._in_a_row} times in a row without finishing a group; the last time: "
        if isinstance(error, WorkerDied):
            raise type(error)(f"{said}{error.args[0]}", error.origin)
        raise GeneratorError(f"{said}{error}")


def _located(error: RLError, replica: Replica, phase: str) -> RLError:
    """The error with its origin, which a `GeneratorError` does not carry."""
    return GeneratorError(f"{replica.origin(phase)}: {error}") if type(error) is GeneratorError else error


def _cause(error: RLError) -> str:
    """The text without the origin: several replicas die of the same cause."""
    return str(error).split(": ", 1)[-1]


def _is_at(error: RLError, replica: Replica) -> bool:
    """Whether the error names this replica's process."""
    return (
        isinstance(error, WorkerDied)
        and error.origin is not None
        and (error.origin.role, error.origin.rank)
        == (
            ROLE,
            replica.index,
        )
    )
