"""Replicas that join a run: their devices are asked for, they start in the background, and those that fail are tried
again."""

import threading
import time

import pytest

from rl_core.errors import WorkerDied
from rl_launch.placement.bundles import DevicesLost
from rl_launch.runtime import elastic_replicas as module
from rl_launch.runtime.elastic_replicas import ElasticReplicas


class FakeReplica:
    def __init__(self, name):
        self.name = name

    def kill(self):
        pass


class Places:
    """Grants requests while there are `free` devices; `failing` starts fail."""

    def __init__(self, free=0, failing=0):
        self.free, self.failing = free, failing
        self.requested, self.granted, self.discarded, self.returned = [], set(), [], []

    def request(self):
        self.requested.append(f"devices {len(self.requested)}")
        return self.requested[-1]

    def is_granted(self, devices):
        if devices not in self.granted and self.free:
            self.free -= 1
            self.granted.add(devices)
        return devices in self.granted

    def begin_on(self, devices):
        def finish():
            if self.failing:
                self.failing -= 1
                raise WorkerDied(f"no engine on {devices}")

        return FakeReplica(devices), finish

    def give_back(self, devices):
        self.returned.append(devices)

    def discard(self, replica):
        self.discarded.append(replica.name)
        self.free += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.fixture
def make_elastic():
    begun = []

    def make(places, num_present, **settings):
        found = ElasticReplicas(places, **{"least": 1, "most": 2, "timeout_s": 60.0, **settings})
        found.begin(num_present)
        begun.append(found)
        return found

    yield make
    for each in begun:
        each.close()


def names(replicas):
    return [replica.name for replica in replicas]


def awaited(condition):
    while not condition():
        time.sleep(0.005)


def test_as_many_replicas_are_asked_for_as_the_run_lacks_and_start_once_there_are_devices(make_elastic):
    places = Places()
    elastic = make_elastic(places, 1, most=3)
    awaited(lambda: len(places.requested) == 2)
    assert elastic.take() == []
    places.free = 1
    assert names(elastic.await_any(1)) == ["devices 0"]
    places.free = 1
    assert names(elastic.await_any(2)) == ["devices 1"]
    assert len(places.requested) == 2


def test_the_devices_of_a_lost_replica_are_released_and_another_is_asked_for(make_elastic):
    places = Places()
    elastic = make_elastic(places, 2)
    elastic.replace(FakeReplica("lost"))
    assert names(elastic.await_any(1)) == ["devices 0"]
    assert places.discarded == ["lost"]


def test_a_replica_that_does_not_start_gives_its_devices_back_and_is_tried_again(make_elastic, caplog):
    places = Places(free=1, failing=2)
    elastic = make_elastic(places, 1)
    assert names(elastic.await_any(1)) == ["devices 2"]
    assert places.discarded == ["devices 0", "devices 1"]
    assert "another replica did not start: no engine on devices 0" in caplog.text


def test_failed_starts_are_retried_less_and_less_often_until_other_devices_may_be_granted(
    make_elastic, caplog, monkeypatch
):
    monkeypatch.setattr(module, "RETRY_S", 30.0)
    now, places = [0.0], Places(free=1, failing=4)
    elastic = make_elastic(places, 1, most=3, clock=lambda: now[0])
    for num_failed, wait in enumerate((30, 60, 120), 1):
        awaited(lambda wait=wait: f"retrying in {wait} s" in caplog.text)
        assert len(places.discarded) == num_failed
        now[0] += wait
    awaited(lambda: "retrying in 240 s" in caplog.text)
    elastic.replace(FakeReplica("lost"))
    assert len(names(elastic.await_any(1))) >= 1


def test_a_wait_for_devices_ends_with_the_keys_and_what_failed_last(make_elastic, monkeypatch):
    elastic = make_elastic(Places(), 0, timeout_s=0.1)
    with pytest.raises(DevicesLost) as refused:
        elastic.await_any(0)
    assert "policy.generation.min_replicas is 1, but only 0 of the run's replicas remain" in str(refused.value)
    assert "cluster.replacement_timeout_s" in str(refused.value)


def test_what_the_thread_cannot_go_on_from_is_raised_where_replicas_are_taken(make_elastic):
    class Broken(Places):
        def request(self):
            raise OSError("Ray is gone")

    elastic = make_elastic(Broken(), 0)
    with pytest.raises(OSError, match="Ray is gone"):
        elastic.await_any(0)


def test_a_run_that_ends_ends_the_replicas_that_are_starting(make_elastic):
    killed = threading.Event()

    class Slow(FakeReplica):
        def kill(self):
            killed.set()

    class SlowPlaces(Places):
        def begin_on(self, devices):
            def finish():
                killed.wait()
                raise WorkerDied("killed")

            return Slow(devices), finish

    places = SlowPlaces(free=1)
    elastic = make_elastic(places, 1)
    awaited(lambda: elastic._starting)
    elastic.close()
    assert places.discarded == ["devices 0"]
