"""Workers are asked next to their work, and one that does not answer costs only its readings."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from rl_core.usage.meter import MachineUsage, ProcessUsage, Usage
from rl_launch.monitoring import poller as module
from rl_launch.monitoring.poller import Monitored, Poller
from rl_launch.monitoring.quantities import SystemReadings
from rl_launch.monitoring.run_monitoring import SystemMonitor

MACHINE = MachineUsage(0.5, 1, 8, None, ())
HERE, THERE = "node of the driver", "another node"


class Call:
    """A call of Ray's: an answer, an error to raise, or nothing yet."""

    def __init__(self, actor, make):
        self.actor, self._make = actor, make

    @property
    def is_over(self):
        return not self.actor.hangs

    def get(self):
        if self.actor.is_dead:
            raise RayActorError
        return self._make()


class Actor:
    """A host of a worker, which answers unless it hangs or is dead."""

    def __init__(self):
        self.hangs = self.is_dead = False
        self.calls = []
        self.usage = SimpleNamespace(remote=self._usage)
        self.call = SimpleNamespace(remote=self._call)

    def _usage(self, *, with_machine):
        self.calls.append("machine" if with_machine else "process")
        return Call(self, lambda: Usage(ProcessUsage(1.0, 100, None), MACHINE if with_machine else None))

    def _call(self, method):
        self.calls.append(method)
        return Call(self, lambda: {"num_running": 3, "num_waiting": 0})


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    def wait(calls, *, timeout, num_returns=1):
        return [call for call in calls if call.is_over], [call for call in calls if not call.is_over]

    context = SimpleNamespace(get_node_id=lambda: HERE)
    fake = SimpleNamespace(wait=wait, get=lambda call: call.get(), get_runtime_context=lambda: context)
    monkeypatch.setattr(module, "ray", fake)


@pytest.fixture
def readings():
    return SystemReadings()


@pytest.fixture
def poller(readings):
    return Poller(readings, period_s=10.0)


def policy(rank, actor, node=HERE):
    return Monitored(f"policy-{rank}", "policy", rank, node, actor)


def replica(actor, node=HERE):
    return Monitored("rollout-worker-0", "rollout-worker", 0, node, actor, generates=True)


def seen(readings):
    return {reading.labels.get("worker") or reading.labels["node"] for reading in readings.newest()}


def test_one_worker_of_each_node_reads_its_machine(poller, readings):
    actors = [Actor() for _ in range(4)]
    poller.read([policy(rank, actor, (HERE, HERE, THERE, THERE)[rank]) for rank, actor in enumerate(actors)], HERE)
    assert [actor.calls for actor in actors] == [["machine"], ["process"], ["machine"], ["process"]]
    assert seen(readings) == {"driver", "policy-0", "policy-1", "policy-2", "policy-3", "node0", "node1"}


def test_the_driver_reads_its_machine_if_no_worker_is_there(poller, readings):
    poller.read([policy(0, Actor(), THERE)], HERE)
    assert {reading.labels["node"] for reading in readings.newest() if "node" in reading.labels} == {"node0", "node1"}


def test_a_replica_reports_its_engine(poller, readings):
    actor = Actor()
    poller.read([replica(actor)], HERE)
    assert actor.calls == ["machine", "health"]
    (running,) = [each for each in readings.newest() if each.quantity.exported == "rl_engine_running_requests"]
    assert (running.value, running.labels["replica"]) == (3, "0")


def test_a_worker_that_hangs_is_asked_once_and_another_one_reads_its_machine(poller, readings):
    hanging, other = Actor(), Actor()
    workers = [policy(0, hanging), policy(1, other)]
    poller.read(workers, HERE)
    hanging.hangs = True
    for _ in range(3):
        poller.read(workers, HERE)
    assert hanging.calls == ["machine", "machine"]
    assert other.calls == ["process", "process", "machine", "machine"]
    assert readings.has_any
    # only the count of restarts, which it need not be asked for
    assert {each.quantity.exported for each in readings.newest() if each.labels.get("worker") == "policy-0"} <= {
        "rl_worker_restarts"
    }
    hanging.hangs = False
    poller.read(workers, HERE)
    assert "rl_worker_cpu_cores" in {each.quantity.exported for each in readings.newest() if "policy-0" in str(each)}


def test_a_node_without_answers_is_forgotten(poller, readings):
    here, there = Actor(), Actor()
    workers = [policy(0, here), policy(1, there, THERE)]
    poller.read(workers, HERE)
    assert {"node0", "node1"} <= seen(readings)
    there.is_dead = True
    poller.read(workers, HERE)
    assert "node0" in seen(readings)
    assert "node1" not in seen(readings)


def test_a_process_that_takes_the_place_of_another_counts_as_a_restart(poller, readings):
    def restarts():
        return [each.value for each in readings.newest() if each.quantity.exported == "rl_worker_restarts"]

    first = Actor()
    poller.read([replica(first)], HERE)
    poller.read([replica(first)], HERE)
    assert restarts() == [0]
    first.hangs = True
    poller.read([replica(Actor())], HERE)
    assert restarts() == [1]
    poller.read([], HERE)
    assert restarts() == []
    poller.read([replica(Actor())], HERE)
    assert restarts() == [2]


def test_a_step_that_is_shorter_than_the_period_has_a_reading_too():
    monitor = SystemMonitor(period_s=1000.0, records=True)
    with monitor.watching(lambda: [policy(0, Actor())]):
        for step in (1, 2, 3):
            monitor.begin_step(step)
            assert monitor.step_metrics()["system/policy-0/cpu_cores"] == 1.0


def test_readings_of_workers_that_have_ended_are_not_exported():
    monitor = SystemMonitor(period_s=1000.0, records=True)
    with monitor.watching(lambda: [policy(0, Actor())]):
        monitor.begin_step(1)
        assert monitor.step_metrics()
        assert "policy-0" in seen(monitor.readings)
    assert seen(monitor.readings) == set()


def test_a_run_goes_on_if_its_workers_cannot_be_listed():
    def fail():
        raise RuntimeError("being replaced")

    monitor = SystemMonitor(period_s=1000.0, records=True)
    with monitor.watching(fail):
        monitor.begin_step(1)
        assert monitor.step_metrics() == {}


def test_readings_that_are_only_exported_are_no_metrics():
    monitor = SystemMonitor(period_s=1000.0, records=False)
    with monitor.watching(lambda: [policy(0, Actor())]):
        monitor.begin_step(1)
        assert monitor.step_metrics() == {}
