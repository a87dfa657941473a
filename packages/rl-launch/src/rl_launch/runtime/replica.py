"""A rollout worker with its replica, in a process that can be replaced, and the watch over its progress."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from rl_algos.rollouts.worker.worker import RolloutWorkerSpec
from rl_core.errors import FailureOrigin, RLError, WorkerStalled
from rl_core.ray.calls import fetch, request_stacks, wait
from rl_core.ray.environment import RemoteEnvironment
from rl_core.ray.host import Place
from rl_core.ray.judges import RemoteJudges
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.speculation import SpeculationCounts
from rl_launch.backends import ROLLOUT_WORKER
from rl_launch.cluster.start_wait import gather_start
from rl_launch.monitoring.poller import Monitored
from rl_launch.runtime.processes import StartTimeouts

_log = logging.getLogger(__name__)

ROLE = "rollout worker"

TIMEOUT_S = 5.0
"""Timeout in seconds of a question to all replicas for their counts."""


class FinishedCall(NamedTuple):
    """The results of a call for the groups that finish next. All of them become ready together.

    Attributes:
        reports: Number and `GroupReport` of each group.
        columns: A `Batch` of the columns that training reads, of all groups.
        records: A `Batch` of the columns that people read.
    """

    reports: ray.ObjectRef
    columns: ray.ObjectRef
    records: ray.ObjectRef


class Follower(NamedTuple):
    """The part of a replica on one of its nodes after the first.

    Attributes:
        start: Makes the empty host.
        target: `"package.module:Class"` in the host.
        args: Its arguments, before the place of the first node.
        log: File of its log.
    """

    start: Callable[[], ActorHandle]
    target: str
    args: tuple[Any, ...]
    log: str


class Replica:
    """One rollout worker with its replica, in processes that can be replaced: one process, or one on each node of a
    replica over nodes. The latter are started, ended and replaced together.

    Args:
        start: Makes the empty host.
        spec: Spec of the worker in the host.
        environments: Clients by environment name.
        index: Number of the replica, for messages.
        logs: Folder of its log.
        timeouts: Startup timeouts.
        judges: Language models that judge its rollouts; None without judges.
        followers: Its parts on further nodes.

    Attributes:
        actor: Its process on its first node, an `ActorHandle`; None before the start.
        name: Name of its log.
    """

    def __init__(
        self,
        start: Callable[[], ActorHandle],
        spec: RolloutWorkerSpec,
        environments: Mapping[str, RemoteEnvironment],
        *,
        index: int,
        logs: str,
        timeouts: StartTimeouts,
        judges: RemoteJudges | None = None,
        followers: Sequence[Follower] = (),
    ) -> None:
        self._start = start
        self._judges = judges
        self._followers = tuple(followers)
        self._follower_actors: list[ActorHandle] = []
        self._spec = spec
        self._environments = dict(environments)
        self._own_environments: dict[str, RemoteEnvironment] = {}
        self.index = index
        self._timeouts = timeouts
        self.actor: Any = None
        self.name = name_of(index)
        self.log = f"{logs}/{self.name}.log"
        self.num_ranks = 0
        self.num_starts = 0
        self.node = ""
        self._places: list[Place] = []

    def __str__(self) -> str:
        return f"{ROLE} {self.index}" + (f" on {self.node}" if self.node else "")

    def begin_start(self) -> Callable[[], None]:
        """Start process and engine; the returned function waits until it is ready."""
        self.actor = self._start()
        self._follower_actors = [each.start() for each in self._followers]
        self.num_starts += 1
        actors, logs = [self.actor, *self._follower_actors], self._logs
        process = [actor.place.remote() for actor in actors]
        process += [actor.log_to.remote(log) for actor, log in zip(actors, logs, strict=True)]
        client = uuid.uuid4().hex
        self._own_environments = {name: each.of_client(client) for name, each in self._environments.items()}
        # Ray hands the place of the first node to all parts as soon as it is known.
        meeting = process[0] if self._followers else None
        started = [self.actor.start.remote(ROLLOUT_WORKER, self._spec, self._own_environments, self._judges, meeting)]
        parts = zip(self._follower_actors, self._followers, strict=True)
        started += [actor.start.remote(each.target, *each.args, meeting) for actor, each in parts]

        def finish() -> None:
            origins = [self.origin("start")] * len(process)
            found = gather_start(process, origins, self._timeouts.process, f"the process of {ROLE} {self.index}")
            self._places = found[: len(actors)]
            self.node = ", ".join(place.address for place in self._places)
            count = len(actors)
            on = (f" of node {number} of {count}" if count > 1 else "" for number in range(1, count + 1))
            origins = [
                FailureOrigin(ROLE, self.index, place.address, f"start{part}")
                for place, part in zip(self._places, on, strict=True)
            ]
            awaited = f"loading the engine of {ROLE} {self.index}"
            self.num_ranks, *_ = gather_start(started, origins, self._timeouts.model, awaited)

        return finish

    def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Begin groups under these numbers."""
        self.call("begin", list(tasks))

    def finished(self) -> FinishedCall:
        """Ask for finished groups; answered as soon as there is one that was not returned before."""
        answers = self.actor.call.options(num_returns=3).remote("finished")
        return FinishedCall(*answers)

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the rollout worker."""
        return self.actor.call.remote(method, *args)

    def generator(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the replica itself."""
        return self.actor.call.remote("generator", method, *args)

    def origin(self, phase: str) -> FailureOrigin:
        """Return the origin of a failure of this replica in a phase of its work."""
        return FailureOrigin(ROLE, self.index, self.node or "its node", phase)

    def write_stacks(self) -> str:
        """Ask the process to write the stacks of its threads to its log; see `request_stacks`."""
        return request_stacks([self.actor, *self._follower_actors], self._logs)

    @property
    def monitored(self) -> list[Monitored]:
        """Its processes, for readings; none before the start."""
        role, actors = ROLE.replace(" ", "-"), [self.actor, *self._follower_actors]
        return [
            Monitored(Path(log).stem, role, self.index, place.node, actor, place.gpus, generates=actor is self.actor)
            for log, place, actor in zip(self._logs, self._places, actors, strict=False)
        ]

    @property
    def _logs(self) -> list[str]:
        return [self.log, *(each.log for each in self._followers)]

    def kill(self) -> None:
        """End its processes and its engine at once, and its conversations."""
        for actor in (self.actor, *self._follower_actors):
            ray.kill(actor)
        for environment in self._own_environments.values():
            environment.release()
        self._own_environments = {}


def name_of(index: int, node: int = 0) -> str:
    """Return the name of the log, traces and profiles of a replica, or of its part on a further node.

    Args:
        index: Number of the replica.
        node: Position of the node among the nodes of the replica.
    """
    return f"rollout-worker-{index}" + (f"-node-{node}" if node else "")


class ProgressWatch:
    """Watches the progress of a replica that has work: its engine samples tokens, or has no requests. In the second
    case rollouts wait for their environments, which have their own deadlines.

    Args:
        replica: Replica with groups in progress.
        timeout_s: Maximum time without progress, in seconds.
        period_s: Seconds between two checks.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, replica: Replica, *, timeout_s: float, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replica = replica
        self._timeout_s = timeout_s
        self._period_s = period_s
        self._clock = clock
        self._asked: ray.ObjectRef | None = None
        self._asked_at = self._progressed_at = self._checked_at = clock()
        self._num_sampled: Any = None

    def note_progress(self) -> None:
        """Note progress: a group was finished."""
        self._progressed_at = self._clock()

    def check(self) -> Mapping[str, Any] | None:
        """Ask for the replica's health, or read the answer; never waits. Time between distant checks does not count.

        Returns:
            The answer; None if there is none yet.

        Raises:
            WorkerStalled: If there is no progress for `timeout_s`.
            RLError: If the engine or the process died.
        """
        now = self._clock()
        away = now - self._checked_at - self._period_s
        self._progressed_at += max(0.0, away)
        self._checked_at = now
        health: Mapping[str, Any] | None = None
        if self._asked is not None and wait([self._asked], 0):
            asked, self._asked = self._asked, None
            health = fetch(asked, self._replica.origin("health"))
            if health["num_requests"] == 0 or health["num_sampled"] != self._num_sampled:
                self._progressed_at = now
            self._num_sampled = health["num_sampled"]
        if self._asked is None and now - self._asked_at >= self._period_s:
            self._asked, self._asked_at = self._replica.call("health"), now
        if now - self._progressed_at > self._timeout_s:
            raise WorkerStalled(f"no progress for {self._timeout_s:g} s", self._replica.origin("rollouts"))
        return health


class SpeculationWatch:
    """Counts of speculative decoding of a run's engines, by step. Engines that decode without drafts are asked once."""

    def __init__(self) -> None:
        self._before: dict[Replica, SpeculationCounts] = {}
        self._is_off = False
        self._paid = True

    def take(self, replicas: Sequence[Replica]) -> SpeculationCounts | None:
        """Return the counts since the last call, of the replicas that answer; None if there are none. Logs a warning in
        the first of several steps with speculation that does not pay.

        Args:
            replicas: Replicas that are alive.
        """
        if self._is_off:
            return None
        calls = [(replica, replica.call("health")) for replica in replicas]
        end = time.monotonic() + TIMEOUT_S
        answers: dict[Replica, SpeculationCounts | None] = {}
        for replica, call in calls:
            try:
                health = fetch(call, replica.origin("speculation"), max(0.0, end - time.monotonic()))
            except RLError as error:
                # The next call that needs a broken replica replaces it.
                _log.debug("%s", error)
            else:
                answers[replica] = SpeculationCounts.of_health(health)
        self._is_off = bool(answers) and not any(answers.values())
        counts = {replica: answer for replica, answer in answers.items() if answer is not None}
        if not counts:
            return None
        since = [now.since(self._before[each]) if each in self._before else now for each, now in counts.items()]
        self._before |= counts
        found = reduce(add, since)
        if self._paid and not found.pays:
            _log.warning(
                "speculative decoding does not pay: requests got %.2f tokens per engine step, below "
                "speculation.min_tokens_per_step (%g), the break-even. Remove policy.generation.vllm_cfg.speculation, "
                "or use a drafter that is closer to the policy",
                found.tokens_per_step,
                found.break_even,
            )
        self._paid = found.pays
        return found
