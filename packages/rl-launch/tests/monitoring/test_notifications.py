"""Which changes of a run are told, and what is said of each."""

import math
from types import SimpleNamespace

import pytest

from rl_core.run import RunEnd
from rl_launch.monitoring.notifications import MIN_S, MIN_STEPS, Notifications, StallWatch
from rl_launch.run_session.config import NotifyConfig
from rl_launch.run_session.observer import ObservedRun

CONFIG = {"policy": {"precision": "bfloat16"}}


class Told:
    """An outbox that keeps what it is given."""

    def __init__(self):
        self.sent = []

    def send(self, notification):
        self.sent.append(notification)

    def finish(self, timeout_s):
        pass

    @property
    def events(self):
        return [(each["event"], each["reason"]) for each in self.sent]


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def watched(told, tmp_path):
    """Notifications of a run at a step, which has begun; its thread makes no look by itself."""
    made = []

    def begin(step=0, **arguments):
        config = arguments.pop("config", NotifyConfig(command=["true"]))
        made.append(Notifications(config, outbox=told, **arguments))
        made[-1].begin(ObservedRun("my run", tmp_path, CONFIG, step))
        made[-1].start(100, [])
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_the_end_of_a_run_is_told_with_its_reason(watched, told, tmp_path):
    notifications = watched()
    notifications.end_step(1, {"reward/mean": 0.5})
    notifications.end(RunEnd("failed", "policy rank 3 died\nmore", 1, 100, {}))
    (sent,) = told.sent
    assert sent["text"] == "my run: failed at step 1 of 100: policy rank 3 died"
    assert (sent["event"], sent["reason"], sent["step"], sent["max_steps"]) == ("failed", "policy rank 3 died", 1, 100)
    assert sent["run_dir"] == str(tmp_path)


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_run_that_finishes_or_is_preempted_is_told(watched, told, status):
    watched().end(RunEnd(status, "", 100, 100, {}))
    assert told.events == [(status, "")]


def test_a_run_that_fails_before_its_first_step_is_told(told, tmp_path):
    notifications = Notifications(NotifyConfig(command=["true"]), outbox=told)
    notifications.begin(ObservedRun("my run", tmp_path, CONFIG, 0))
    notifications.end(RunEnd("failed", "no GPU", 0, 0, {}))
    assert told.sent[0]["text"] == "my run: failed at its start: no GPU"
    notifications.close()


def test_a_run_that_resumes_from_a_checkpoint_is_told_and_a_new_one_is_not(watched, told):
    watched(step=0)
    assert told.events == []
    watched(step=7)
    assert told.events == [("resumed", "")]


def test_an_error_after_which_the_run_is_restored_is_not_its_end(watched, told, tmp_path):
    restoration = SimpleNamespace(goes_on=True)
    notifications = watched(restarts=lambda: restoration.goes_on)
    notifications.end(RunEnd("failed", "a node was lost", 0, 100, {}))
    notifications.begin(ObservedRun("my run", tmp_path, CONFIG, 0))
    notifications.start(100, [])
    assert told.events == [("resumed", "a node was lost")]
    restoration.goes_on = False
    notifications.end(RunEnd("failed", "a node was lost", 0, 100, {}))
    assert [event for event, _ in told.events] == ["resumed", "failed"]


def test_only_the_chosen_events_are_sent(watched, told):
    notifications = watched(step=7, config=NotifyConfig(command=["true"], events=["failed"]))
    notifications.end_step(8, {"reward/mean": math.nan})
    notifications.end(RunEnd("finished", "", 8, 8, {}))
    assert told.events == []


def test_a_metric_that_is_not_finite_is_an_alarm_once(watched, told):
    notifications = watched()
    for step in (1, 2):
        notifications.end_step(step, {"reward/mean": math.nan, "train/loss": math.inf, "policy/nll": 1.0})
    assert told.events == [("alarm", "not a finite number: reward/mean, train/loss")]


def test_advice_is_an_alarm_once_it_has_enough_steps(watched, told):
    asked = []

    def findings(rows, config):
        asked.append((len(rows), config))
        return [("policy/nll", f"the entropy collapsed after {len(rows)} steps")]

    notifications = watched(findings=findings)
    for step in range(1, MIN_STEPS + 3):
        notifications.end_step(step, {"policy/nll": 1.0})
        notifications.check()
        notifications.check()
    assert asked == [(MIN_STEPS + more, CONFIG) for more in range(3)]
    assert told.events == [("alarm", f"the entropy collapsed after {MIN_STEPS} steps")]


def test_the_advice_that_rl_show_prints_is_what_a_run_alarms_by():
    from rl_launch.commands.train import findings

    rows = [{"step": step, "policy/nll": 1.0 / 2**step, "reward/mean": 0.1 * step} for step in range(12)]
    assert [subject for subject, _ in findings(rows, CONFIG)] == ["policy/nll"]


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


def test_a_run_is_stalled_once_if_no_step_comes_for_a_multiple_of_the_usual_time(clock):
    watch = StallWatch(5.0, clock=lambda: clock.now)
    watch.start()
    clock.now += 10_000
    # how long the first step may take is not known
    assert watch.check() is None
    watch.note_step()
    for _ in range(20):
        clock.now += 100
        watch.note_step()
    clock.now += 500
    assert watch.check() is None
    clock.now += 1
    assert watch.check() == (501, 100)
    assert watch.check() is None
    watch.note_step()
    clock.now += 501
    assert watch.check() == (501, 100)


def test_quick_steps_are_not_stalled_within_a_minute(clock):
    watch = StallWatch(5.0, clock=lambda: clock.now)
    watch.start()
    for _ in range(5):
        clock.now += 1
        watch.note_step()
    clock.now += MIN_S
    assert watch.check() is None
    clock.now += 0.5
    assert watch.check() == (MIN_S + 0.5, 1)


def test_a_run_that_has_ended_is_not_stalled(clock):
    watch = StallWatch(5.0, clock=lambda: clock.now)
    watch.start()
    clock.now += 1
    watch.note_step()
    watch.stop()
    clock.now += 10_000
    assert watch.check() is None
