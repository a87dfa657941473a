"""The thread that asks machines, workers and replicas for readings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rl_core.usage.meter import Meter, Usage
from rl_launch.monitoring.quantities import (
    HEALTH,
    PROCESS,
    WORKER_RESTARTS,
    SystemReading,
    SystemReadings,
    readings_of,
    readings_of_machine,
)

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""How long one reading waits for answers; later ones count in the next reading."""

DRIVER = "driver"
"""Name of this process among the workers."""


@dataclass(frozen=True)
class Monitored:
    """A worker that is asked for readings.

    Args:
        name: Its name, as its log has it: `policy-0`.
        role: Its role: `policy`, `rollout-worker`.
        rank: Rank, or number of the replica.
        node: Ray's id of its node.
        actor: Its process, one of the hosts of `rl_core.ray.host`.
        gpus: GPUs that Ray gave it: indices or UUIDs.
        generates: True if it holds a replica.
    """

    name: str
    role: str
    rank: int
    node: str
    actor: ActorHandle
    gpus: tuple[str, ...] = ()
    generates: bool = False

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of its readings."""
        number = {"replica": str(self.rank)} if self.generates else {"rank": str(self.rank)}
        return {"worker": self.name, "role": self.role, **number}


class Poller:
    """Asks all workers from time to time, each at most once before it answers, in a thread of its own. A worker that
    does not answer costs only its readings; another one then reads its machine.

    Args:
        readings: Takes what is read.
        period_s: Seconds between two readings.
    """

    def __init__(self, readings: SystemReadings, *, period_s: float) -> None:
        self._readings = readings
        self._period_s = period_s
        # Ray, if the driver starts it, and so all workers are its descendants
        self._meter = Meter(with_children=False)
        # These calls are not answered yet, by the name of the worker and whether its engine is asked.
        self._questions: dict[tuple[str, bool], tuple[Monitored, ray.ObjectRef]] = {}
        self._nodes: dict[str, str] = {}
        self._processes: dict[str, Any] = {}
        self._restarts: dict[str, int] = {}
        self._changed = threading.Condition()
        self._num_rounds = 0
        self._is_wanted = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, workers: Callable[[], Sequence[Monitored]]) -> None:
        """Start to ask.

        Args:
            workers: Returns the workers of the run at present; called in the thread.
        """
        driver_node = ray.get_runtime_context().get_node_id()
        # Each thread has its own event, because an earlier one may still wait for an answer.
        self._ended = threading.Event()
        self._questions.clear()
        self._thread = threading.Thread(
            target=self._run, args=(workers, driver_node, self._ended), name="monitoring", daemon=True
        )
        self._thread.start()

    def ask_now(self, timeout_s: float) -> None:
        """Make a reading before the next one is due, and wait for its end."""
        if self._thread is None:
            return
        with self._changed:
            before = self._num_rounds
            self._is_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_rounds > before, timeout_s)

    def stop(self) -> None:
        """End the thread, before the workers end."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        thread.join(2 * ANSWER_TIMEOUT_S)

    def _run(self, workers: Callable[[], Sequence[Monitored]], driver_node: str, ended: threading.Event) -> None:
        while True:
            try:
                self.read(workers(), driver_node)
            except Exception as error:  # noqa: BLE001  # readings must not cost the run anything
                _log.debug("no readings: %s: %s", type(error).__name__, error)
            with self._changed:
                self._num_rounds += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_wanted or ended.is_set(), self._period_s)
                self._is_wanted = False
                if ended.is_set():
                    return

    def read(self, workers: Sequence[Monitored], driver_node: str) -> None:
        """Make one reading.

        Args:
            workers: Workers of the run.
            driver_node: Ray's id of this process's node.
        """
        self._note_processes(workers)
        late = {name for name, _ in self._questions}
        asked = self._ask(workers)
        with_machine = driver_node not in {worker.node for worker in workers}
        usage = self._meter.read(with_machine=with_machine)
        labels = {"worker": DRIVER, "role": DRIVER, "rank": "0"}
        self._readings.add(readings_of(PROCESS, DRIVER, labels, vars(usage.process)))
        nodes = self._take_machine(driver_node, usage, ())
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_TIMEOUT_S)
        gpus: dict[str, set[str]] = {}
        for worker in workers:
            gpus.setdefault(worker.node, set()).update(worker.gpus)
        for (name, asks_engine), (worker, answer) in list(self._questions.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._questions[name, asks_engine]
                nodes |= self._take(worker, answer, gpus[worker.node], asks_engine=asks_engine)
        for name in late & {name for name, _ in self._questions}:
            self._readings.forget("worker", name)
        for name in set(self._nodes.values()) - nodes:
            self._readings.forget("node", name)

    def _note_processes(self, workers: Sequence[Monitored]) -> None:
        """Count processes that have taken the place of another, and forget those that are gone."""
        for worker in workers:
            before = self._processes.get(worker.name)
            is_new = before is not None and before is not worker.actor
            self._processes[worker.name] = worker.actor
            self._restarts[worker.name] = self._restarts.get(worker.name, 0) + is_new
            self._readings.add(
                [SystemReading(WORKER_RESTARTS, worker.name, worker.labels, self._restarts[worker.name])]
            )
        present = {worker.name for worker in workers}
        for name in set(self._processes) - present:
            self._readings.forget("worker", name)
        self._questions = {
            key: (worker, answer)
            for key, (worker, answer) in self._questions.items()
            if worker.name in present and worker.actor is self._processes[worker.name]
        }

    def _ask(self, workers: Sequence[Monitored]) -> list[ray.ObjectRef]:
        """Ask every worker that owes no answer; the first of each node for its machine, too."""
        asked: dict[tuple[str, bool], tuple[Monitored, ray.ObjectRef]] = {}
        read_nodes: set[str] = set()
        for worker in workers:
            if (worker.name, False) not in self._questions:
                usage: Any = worker.actor.usage.remote(with_machine=worker.node not in read_nodes)
                read_nodes.add(worker.node)
                asked[worker.name, False] = worker, usage
            if worker.generates and (worker.name, True) not in self._questions:
                health: Any = worker.actor.call.remote("health")
                asked[worker.name, True] = worker, health
        self._questions |= asked
        return [answer for _, answer in asked.values()]

    def _take(self, worker: Monitored, answered: ray.ObjectRef, gpus: set[str], *, asks_engine: bool) -> set[str]:
        """Take an answer in; returns the name of the node if it was read."""
        try:
            answer: Any = ray.get(answered)
        except RayError as error:
            _log.debug("no readings of %s: %s", worker.name, str(error).partition("\n")[0])
            self._readings.forget("worker", worker.name)
            return set()
        if asks_engine:
            self._readings.add(readings_of(HEALTH, worker.name, worker.labels, answer))
            return set()
        self._readings.add(readings_of(PROCESS, worker.name, worker.labels, vars(answer.process)))
        return self._take_machine(worker.node, answer, gpus)

    def _take_machine(self, node: str, usage: Usage, gpus: Collection[str]) -> set[str]:
        if usage.machine is None:
            return set()
        # Nodes are numbered in the order of their first readings.
        name = self._nodes.setdefault(node, f"node{len(self._nodes)}")
        self._readings.add(readings_of_machine(name, usage.machine, gpus))
        return {name}
