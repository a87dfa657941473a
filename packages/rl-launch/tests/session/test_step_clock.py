import io

import pytest
from rich.console import Console

from rl_launch.run_session.step_clock import StepClock
from rl_launch.run_session.tracking.progress import RunProgress


def make_clock():
    return StepClock(RunProgress("run", Console(file=io.StringIO())))


def test_timings_sum_a_phase_that_is_entered_twice():
    clock = make_clock()
    clock.begin(1, 2)
    for _ in range(2):
        with clock.phase("training"):
            pass
    with clock.phase("generation"):
        pass
    timings = clock.timings({}, 5.0)
    assert timings.keys() == {"time/training", "time/generation", "time/step"}
    assert timings["time/step"] == 5.0


def test_a_phase_within_another_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rl_launch.run_session.step_clock.time.monotonic", lambda: now[0])
    clock = make_clock()
    clock.begin(1, 1)
    with clock.phase("generation"):
        now[0] += 3.0
        for _ in range(2):
            with clock.phase("judging"):
                now[0] += 1.0
                with clock.phase("recording"):
                    now[0] += 0.5
    with clock.phase("generation"):
        now[0] += 4.0
    assert clock.timings({}, clock.seconds) == {
        "time/generation": 7.0,
        "time/judging": 2.0,
        "time/recording": 1.0,
        "time/step": 10.0,
    }


def test_timings_of_one_step_do_not_reach_the_next():
    clock = make_clock()
    clock.begin(1, 2)
    with clock.phase("training"):
        pass
    clock.end({}, clock.seconds)
    clock.begin(2, 2)
    assert clock.timings({}, 1.0) == {"time/step": 1.0}


def test_generation_ahead_of_training_has_the_whole_step_for_its_tokens():
    clock = make_clock()
    clock.begin(1, 1)
    with clock.phase("generation"):
        pass
    recorded = {"generation/num_tokens": 40.0, "idle/trainer": 0.5}
    assert clock.timings(recorded, 4.0)["generation/tokens_per_second"] == 10.0
    del recorded["idle/trainer"]
    assert clock.timings(recorded, 4.0)["generation/tokens_per_second"] > 10.0


def test_innermost_phase_stays_visible_after_an_error():
    clock = make_clock()
    with pytest.raises(RuntimeError), clock.phase("training"), clock.phase("recording"):
        raise RuntimeError
    assert clock.doing == "recording"


def test_phase_outside_a_step_counts_to_no_step():
    clock = make_clock()
    with clock.phase("restoring"):
        pass
    clock.begin(1, 1)
    assert clock.timings({}, 1.0) == {"time/step": 1.0}
