"""All replicas of a run: replaced when they die, and brought to the run's weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rl_core.errors import GeneratorError, RLError, WeightSyncError, WorkerDied, WorkerStalled
from rl_core.ray.calls import fetch
from rl_core.tracing import spans
from rl_core.weights import WeightUpdate
from rl_launch.placement.residency import Tenant, TenantResidency
from rl_launch.placement.topology import GENERATION
from rl_launch.run_session.traces.step_trace import RESTARTS
from rl_launch.runtime.elastic_replicas import ElasticReplicas
from rl_launch.runtime.opponents import WeightSender
from rl_launch.runtime.replica import ROLE, Replica

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 600.0
"""Timeout in seconds for leaving a device or returning to it."""

MAX_DEATHS = 5
"""Maximum number of deaths of replicas in a row, without a finished group between them, before the run fails."""


class RestartBudget:
    """Counts deaths of replicas, and raises the cause when there are too many."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last = ""
        self._has_finished_any = False

    def reset(self) -> None:
        """Note that a group was finished."""
        self._in_a_row = 0
        self._has_finished_any = True

    def spend(self, error: RLError) -> None:
        """Count a death, or several at once.

        Raises:
            RLError: The error, if an engine has died twice in this way before it finished anything, if a process does
                not start at all, or after too many deaths in a row.
        """
        self._in_a_row += 1
        # Several replicas can die of the same cause, so the text is compared without the origin.
        cause, self._last = self._last, str(error).split(": ", 1)[-1]
        if isinstance(error, WorkerStalled) and error.origin is not None and error.origin.phase == "start":
            raise error
        if isinstance(error, GeneratorError) and not self._has_finished_any and cause == self._last:
            raise error
        if self._in_a_row < MAX_DEATHS:
            return
        said = f"replicas died {self._in_a_row} times in a row without finishing a group; the last time: "
        if isinstance(error, WorkerDied):
            raise type(error)(f"{said}{error.args[0]}", error.origin)
        raise GeneratorError(f"{said}{error}")


class ReplicaGroup:
    """Replicas that serve the same weights. One that died is lost until `restart_lost` has replaced it, or
    `retire_lost` has removed it from the group.

    Args:
        replicas: Started replicas on their devices.
        residency: Residency of devices that the replicas share with others; None if they share none.
        weights: Sends weights to the replicas; None if they serve the weights that they have loaded.
        elastic: Replicas that join; None if there are always the same.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        residency: TenantResidency | None,
        *,
        weights: WeightSender | None = None,
        elastic: ElasticReplicas | None = None,
    ) -> None:
        self.replicas = list(replicas)
        self._residency = residency
        self._weights = weights
        self._elastic = elastic
        self._update: WeightUpdate | None = None
        self._lost: dict[Replica, RLError] = {}
        self._has_weights = True
        self.restart_budget = RestartBudget()
        if residency is not None:
            self.sleep()
            residency.join(GENERATION, Tenant(self.sleep, self.wake))
        if elastic is not None:
            elastic.begin(len(self.replicas))

    @property
    def lost(self) -> frozenset[Replica]:
        """Replicas that have died and are not replaced yet."""
        return frozenset(self._lost)

    @property
    def is_whole(self) -> bool:
        """True if the run continues with the replicas that it has."""
        return not self._lost and (self._elastic is None or len(self.replicas) >= self._elastic.least)

    @property
    def has_weights(self) -> bool:
        """False if a replica has dropped its weights in sleep, so that they are sent again before it serves."""
        return self._has_weights

    def hold(self) -> AbstractContextManager[None]:
        """Return a context that keeps the replicas on their devices. Some may be lost when it is entered."""
        return self._residency.hold(GENERATION) if self._residency else nullcontext()

    def adopt(self, update: WeightUpdate | None, *, in_flight: bool = False) -> None:
        """Bring every replica to this version, verified; one that dies meanwhile, or is lost already, is replaced. If
        replicas can join and leave, one that computes something else than the others and the policy is replaced too.

        Those that are restarted later get the same update, which must not be stale then.

        Args:
            update: The last update that the policy has published; None if it has published nothing yet.
            in_flight: Interrupt completions in progress instead of waiting until they are finished.
        """
        while True:
            self.retire_lost()
            if self._lost:
                # Replicas that were lost together count once.
                self.restart_budget.spend(next(iter(self._lost.values())))
            try:
                self._restart_processes()
                self._join()
                if update is not None:
                    assert self._weights is not None, "replicas that are given weights have a sender"
                    self._weights.send(update, self.replicas, in_flight=in_flight)
                    self._update = update
                self._has_weights = True
                return
            except (GeneratorError, WorkerDied) as error:
                living = self._living()
                ill = self._ill(living)
                failed = error.origin if isinstance(error, WorkerDied) else None
                at = None if failed is None else (failed.role, failed.rank)
                dead = [replica for replica in living if replica in ill or at == (ROLE, replica.index)]
                if not dead and not self._lost:
                    raise
                version = "" if update is None else f" of version {update.version}"
                _log.warning("weight sync%s was interrupted: %s", version, error)
                for replica in dead:
                    self._lose(replica, error)
            except WeightSyncError as error:
                places = {(origin.role, origin.rank) for origin in error.origins}
                wrong = [replica for replica in self._living() if (ROLE, replica.index) in places]
                # Without any replica that computes as the policy does, the fault is not a replica's.
                if self._elastic is None or not wrong or len(wrong) == len(self._living()):
                    raise
                for replica in wrong:
                    _log.warning("%s is left out: %s", replica, error)
                    self._lose(replica, error)

    def restart_lost(self) -> None:
        """Replace lost replicas, and send the weights again if some replica has none.

        Raises:
            GeneratorError, WorkerDied: If replicas have died too often; contains the cause.
            PlacementError: If the cluster has no devices for replicas that the run needs.
        """
        if not self.is_whole or not self._has_weights:
            self.adopt(self._update)

    def retire_lost(self) -> None:
        """Remove lost replicas from the group if others may join it later.

        Raises:
            GeneratorError, WorkerDied: If replicas have died too often; contains the cause.
        """
        if self._elastic is None or not self._lost:
            return
        self.restart_budget.spend(next(iter(self._lost.values())))
        for replica in self._lost:
            self.replicas.remove(replica)
            self._elastic.replace(replica)
        self._lost = {}
        _log.warning("%d replicas remain; replacements will join when devices are free", len(self.replicas))

    def fail(self, replica: Replica, error: RLError, *, num_groups: int) -> None:
        """Lose a replica after a call of it failed, unless it is lost already.

        Args:
            replica: Replica whose call failed.
            error: Error that the call raised.
            num_groups: Number of unfinished groups, for the message.

        Raises:
            GeneratorError: If the replica is healthy and refused the call: it would refuse again.
        """
        if replica in self._lost:
            return
        located = _located(error, replica, "rollouts")
        if isinstance(error, GeneratorError) and not self._ill([replica]):
            raise located
        _log.warning("%s; replacing it and running its %d unfinished groups again", located, num_groups)
        if isinstance(error, WorkerStalled):
            _log.warning("%s", replica.write_stacks())
        self._lose(replica, located)

    def sleep(self) -> None:
        """Put the replicas to sleep, off their devices. One that died meanwhile is replaced before it is needed."""
        kept = self._on_living("sleep")
        self._has_weights = self._has_weights and all(kept)

    def wake(self) -> None:
        """Return the replicas to their devices."""
        self._on_living("wake")

    def close(self) -> None:
        """End all engines, then their processes."""
        if self._elastic is not None:
            self._elastic.close()
        closing = [(replica, replica.call("close")) for replica in self.replicas]
        for replica, ref in closing:
            try:
                fetch(ref, replica.origin("close"), HEALTH_TIMEOUT_S)
            except RLError as error:
                _log.warning("%s", error)
        for replica in self.replicas:
            replica.kill()

    def _living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica not in self._lost]

    def _on_living(self, method: str) -> list[bool]:
        calls = [(replica, replica.generator(method)) for replica in self._living()]
        answers = []
        for replica, ref in calls:
            try:
                answers.append(fetch(ref, replica.origin(method), TURN_TIMEOUT_S))
            except (GeneratorError, WorkerDied) as error:
                self._lose(replica, _located(error, replica, method))
        return answers

    def _lose(self, replica: Replica, error: RLError) -> None:
        """Give a replica up until it is replaced."""
        replica.kill()
        self._lost[replica] = error
        spans.mark(RESTARTS, f"{replica} is lost")

    def _restart_processes(self) -> None:
        """Restart lost replicas, all at once; on shared devices no other tenant is resident meanwhile."""
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
                spans.mark(RESTARTS, f"{replica} has been restarted")
                if self._residency is not None:
                    fetch(replica.generator("sleep"), replica.origin("sleep"), TURN_TIMEOUT_S)
            except (GeneratorError, WorkerDied) as error:
                failures[replica] = _located(error, replica, "start")
        self._lost = failures
        if failures:
            raise next(iter(failures.values()))

    def _join(self) -> None:
        """Add replicas that have become ready, and wait for the ones that the run needs."""
        if self._elastic is None:
            return
        joining = self._elastic.take()
        while len(self.replicas) + len(joining) < self._elastic.least:
            joining += self._elastic.await_any(len(self.replicas) + len(joining))
        self.replicas += joining
        for replica in joining:
            _log.info("%s joins; replicas: %d", replica, len(self.replicas))
            spans.mark(RESTARTS, f"{replica} joins")

    def _ill(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that do not answer, or have a dead engine."""
        ill = []
        for replica, ref in [(replica, replica.call("health")) for replica in replicas]:
            try:
                fetch(ref, replica.origin("health"), HEALTH_TIMEOUT_S)
            except RLError:
                ill.append(replica)
        return ill


def _located(error: RLError, replica: Replica, phase: str) -> RLError:
    """Return the error with its origin, which is not part of a `GeneratorError`."""
    return GeneratorError(f"{replica.origin(phase)}: {error}") if type(error) is GeneratorError else error
