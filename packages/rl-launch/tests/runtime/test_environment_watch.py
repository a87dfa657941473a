"""Restarts of environments' processes reach the log of the run."""

import logging
from types import SimpleNamespace

import pytest

from rl_core.errors import WorkerDied
from rl_launch.runtime import replicas
from rl_launch.runtime.replicas import PERIOD_S, EnvironmentActor, EnvironmentWatch


class Actor:
    """An environment whose health is what the test says; a call is answered once it says so."""

    def __init__(self):
        self.health = {"num_restarts": 0, "restart_reason": ""}
        self.num_calls = 0
        self.answers = True
        self.killed = []
        self.call = SimpleNamespace(remote=self._called)

    def _called(self, method):
        assert method == "health"
        self.num_calls += 1
        return self

    def restart(self, count, reason):
        self.health = {"num_restarts": count, "restart_reason": reason}


@pytest.fixture
def watched(monkeypatch, caplog):
    def fetch(actor, _origin, _timeout_s=None):
        if isinstance(actor.health, Exception):
            raise actor.health
        return actor.health

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(replicas, "wait", lambda refs, _timeout: [ref for ref in refs if ref.answers])
    monkeypatch.setattr(replicas, "fetch", fetch)
    actor, clock = Actor(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(replicas.ray, "kill", lambda actor, no_restart: actor.killed.append(no_restart))
    judge = EnvironmentActor(actor, "logs/environment-judge.log", 20.0, "node")
    watch = EnvironmentWatch({"judge": judge}, clock=lambda: clock.now)

    def later():
        clock.now += PERIOD_S
        watch.check()
        watch.check()

    return SimpleNamespace(watch=watch, actor=actor, later=later)


def test_each_restart_is_told_once_with_its_reason_and_the_log(watched, caplog):
    watched.later()
    assert not caplog.messages
    watched.actor.restart(2, "environment judge needed more than its memory limit of 4 GiB")
    watched.later()
    watched.later()
    watched.actor.restart(3, "it hung")
    watched.later()
    first, second = caplog.messages
    assert first == (
        "environment judge: 2 restart(s) of its processes, 2 so far, the last because environment judge needed more "
        "than its memory limit of 4 GiB. More: logs/environment-judge.log"
    )
    assert "1 restart(s) of its processes, 3 so far, the last because it hung." in second


def test_it_asks_seldom_and_never_waits(watched):
    watched.watch.check()
    assert watched.actor.num_calls == 0
    watched.actor.answers = False
    for _ in range(3):
        watched.later()
    assert watched.actor.num_calls == 1


def test_restarts_of_the_last_seconds_are_told_at_the_end(watched, caplog):
    watched.actor.restart(1, "it hung")
    watched.watch.finish()
    assert "1 restart(s) of its processes, 1 so far, the last because it hung" in caplog.text


def test_a_process_that_is_dead_is_left_to_the_rollouts_that_need_it(watched, caplog):
    watched.actor.health = WorkerDied("gone")
    watched.later()
    assert not caplog.messages
    watched.actor.restart(1, "it hung")  # counted anew by another process
    watched.later()
    assert len(caplog.messages) == 1


def test_a_host_that_does_not_answer_within_its_deadline_and_a_margin_is_killed_once_and_started_again(watched, caplog):
    watched.actor.answers = False
    # asked at 10 s, and 50 s may pass
    for _ in range(6):
        watched.later()
    assert not watched.actor.killed
    for _ in range(20):
        watched.later()
    assert watched.actor.killed == [False]
    (said,) = caplog.messages
    assert said.startswith("environment judge: its host has not answered for 50 s, 30 more than its deadline_s; it is")
    watched.actor.answers = True
    watched.later()
    watched.actor.answers = False
    for _ in range(10):
        watched.later()
    assert watched.actor.killed == [False, False]
