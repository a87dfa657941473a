"""All rollout workers of a run, each with its replica, and their restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rl_algos.rollouts.worker import RolloutWorkerSpec
from rl_core.errors import GeneratorError, Origin, RLError, WorkerDied, WorkerError
from rl_core.generation import RolloutTask, WeightUpdate
from rl_core.ray.calls import gather, translate
from rl_core.ray.environment import RemoteEnvironment
from rl_core.rollout import RolloutGroup
from rl_launch.weight_sync import WeightSync

_log = logging.getLogger(__name__)

ROLLOUT_WORKER = "rl_algos.rollouts.worker:RolloutWorker"
START_TIMEOUT_S = 1800.0
MOST_RESTARTS = 5
"""Restarts of one replica in a row, without a finished call between them, before the run fails."""


class Replica:
    """One rollout worker with its replica, in a process that can be replaced.

    Args:
        start: makes the empty host.
        spec: what it hosts.
        environments: clients by environment name.
        index: number of the replica, for messages.
        logs: folder of its log.
    """

    def __init__(
        self,
        start: Callable[[], ActorHandle],
        spec: RolloutWorkerSpec,
        environments: Mapping[str, RemoteEnvironment],
        *,
        index: int,
        logs: str,
    ) -> None:
        self._start = start
        self._spec = spec
        self._environments = dict(environments)
        self._index = index
        self._logs = logs
        self._actor: ActorHandle = None
        self.num_ranks = 0
        self.node = ""

    def begin_start(self) -> Callable[[], None]:
        """Start process and engine; the returned function waits until it is ready."""
        self._actor = self._start()
        log = self._actor.log_to.remote(f"{self._logs}/rollout-worker-{self._index}.log")
        place = self._actor.place.remote()
        started = self._actor.start.remote(ROLLOUT_WORKER, self._spec, self._environments)

        def finish() -> None:
            refs = [log, place, started]
            _, found, self.num_ranks = gather(refs, [self.origin("start")] * len(refs), START_TIMEOUT_S)
            self.node = found.address

        return finish

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the rollout worker."""
        return self._actor.call.remote(method, *args)

    def generator(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the replica itself."""
        return self._actor.call.remote("generator", method, *args)

    def origin(self, phase: str) -> Origin:
        """For messages."""
        return Origin("rollout worker", self._index, self.node or "its node", phase)

    def kill(self) -> None:
        """End the process and its engine at once."""
        ray.kill(self._actor)

    def close(self) -> None:
        """End the engine, then the process."""
        try:
            gather([self.call("close")], [self.origin("close")], 30.0)
        except RLError as error:
            _log.warning("%s", error)
        self.kill()


class RolloutPool:
    """Runs tasks on all replicas; a dead one is restarted, given the current weights, and its tasks run again.

    Args:
        replicas: started.
        sync: brings weights to replicas; None where they keep serving those they loaded.
        hold: context in which the replicas have their devices.
    """

    def __init__(
        self, replicas: Sequence[Replica], sync: WeightSync | None, hold: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._replicas = list(replicas)
        self._sync = sync
        self._hold = hold
        self._update: WeightUpdate | None = None

    def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutGroup]:
        """One group per task, in order."""
        if not tasks:
            return []
        shares = [range(start, len(tasks), len(self._replicas)) for start in range(len(self._replicas))]
        groups: dict[int, RolloutGroup] = {}
        with self._hold():
            answers = [
                (replica, share, replica.call("run", [tasks[i] for i in share]))
                for replica, share in zip(self._replicas, shares, strict=True)
                if len(share)
            ]
            for replica, share, ref in answers:
                groups.update(zip(share, self._finish(replica, ref, [tasks[i] for i in share]), strict=True))
        return [groups[i] for i in range(len(tasks))]

    def adopt(self, update: WeightUpdate) -> None:
        """Bring every replica to this version, verified."""
        assert self._sync is not None, "these replicas adopt no weights"
        for _ in range(MOST_RESTARTS):
            try:
                self._sync.transfer(update, self._replicas)
                self._update = update
                return
            except (GeneratorError, WorkerDied) as error:
                _log.warning("weight sync of version %d broke off: %s", update.version, error)
                if not self._restart_dead():
                    raise
        raise WorkerDied(f"replicas died {MOST_RESTARTS} times in a row during weight sync")

    def close(self) -> None:
        """End all replicas."""
        for replica in self._replicas:
            replica.close()

    def _finish(self, replica: Replica, ref: ray.ObjectRef, tasks: list[RolloutTask]) -> list[RolloutGroup]:
        for _ in range(MOST_RESTARTS):
            try:
                return ray.get(ref)
            except (RayTaskError, RayActorError) as failure:
                error = translate(failure, replica.origin("rollouts"))
                if not isinstance(error, GeneratorError | WorkerDied) or _refuses(error, replica):
                    raise error from None
                _log.warning("%s; restarting it and running its %d prompts again", error, len(tasks))
            self._restart(replica)
            ref = replica.call("run", tasks)
        raise WorkerDied(f"died {MOST_RESTARTS} times in a row", replica.origin("rollouts"))

    def _restart_dead(self) -> bool:
        """Restart replicas that do not answer; whether there were any."""
        dead = [replica for replica in self._replicas if not _answers(replica)]
        for replica in dead:
            replica.kill()
        for finish in [replica.begin_start() for replica in dead]:
            finish()
        return bool(dead)

    def _restart(self, replica: Replica) -> None:
        replica.kill()
        replica.begin_start()()
        if self._sync is not None and self._update is not None:
            self._sync.transfer(self._update, [replica])


def _refuses(error: RLError, replica: Replica) -> bool:
    """Whether a replica that is well will not do what it was asked: it would refuse again after a restart."""
    return isinstance(error, GeneratorError) and _answers(replica)


def _answers(replica: Replica) -> bool:
    try:
        gather([replica.call("health")], [replica.origin("health")], 30.0)
    except (GeneratorError, WorkerDied, WorkerError):
        return False
    return True
