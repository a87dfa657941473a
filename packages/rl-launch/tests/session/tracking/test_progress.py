import io
import itertools
import logging

from rich.console import Console

from rl_launch.run_session.tracking.progress import RunProgress, duration, sparkline


def test_a_pipe_gets_plain_lines_and_no_control_codes(caplog):
    out = io.StringIO()
    progress = RunProgress("grpo", Console(file=out, force_terminal=False))
    with caplog.at_level(logging.INFO, logger="rl_launch"):
        progress.start()
        progress.begin(1, 3)
        progress.phase("generation")
        progress.finish(1, {"reward/mean": 0.25, "train/loss": 1.5}, 2.0)
        progress.close()
    assert out.getvalue() == ""
    assert caplog.messages == ["step 1/3  reward 0.25  loss 1.5  2.0 s  4 s left"]


def test_a_terminal_shows_step_phase_and_trend():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    progress = RunProgress("grpo", console)
    progress.begin(1, 3)
    for step, reward in ((1, 0.0), (2, 1.0)):
        progress.finish(step, {"reward/mean": reward}, 2.0)
    progress.begin(3, 3)
    progress.phase("weight_sync")
    console.print(progress.render())
    text = out.getvalue()
    assert all(part in text for part in ("step 3/3", "reward 1", "▁█", "weight sync", "2 s left"))


def test_a_sparkline_spans_its_values():
    assert sparkline([0.0, 0.5, 1.0]) in ("▁▄█", "▁▅█")
    assert sparkline([2.0, 2.0, float("nan")]) == "▁▁"


def test_durations():
    assert [duration(seconds) for seconds in (5, 187, 3723)] == ["5 s", "3:07", "1:02:03"]


def told(caplog, shares, num_steps):
    """The advice of each step's line, for `(trainer, generators)` by step."""
    progress = RunProgress("grpo", Console(file=io.StringIO(), force_terminal=False), clock=itertools.count().__next__)
    with caplog.at_level(logging.INFO, logger="rl_launch"):
        for step in range(1, num_steps + 1):
            trainer, generators = shares(step)
            progress.begin(step, num_steps)
            progress.finish(step, {"idle/trainer": trainer, "idle/generators": generators}, 2.0)
    lines = {step: message.partition(" left  ")[2] for step, message in enumerate(caplog.messages, start=1)}
    return {step: advice for step, advice in lines.items() if advice}


def test_the_log_says_once_who_waits_and_what_to_change(caplog):
    (advice,) = told(caplog, lambda step: (0.5, 0.1), 40).items()
    assert advice[0] == 15
    assert "training waits for rollouts 50% of the time: give generation more devices" in advice[1]
    assert "async_grpo.max_trajectory_age_steps" in advice[1]


def test_the_start_and_the_tail_of_a_run_are_no_reason_for_advice(caplog):
    assert not told(caplog, lambda step: (0.0, 0.9) if step <= 5 else (0.9, 0.0) if step > 36 else (0.1, 0.1), 40)
    assert not told(caplog, lambda step: (0.5, 0.1), 18)


def test_a_side_that_waits_later_is_told_when_the_window_shows_it(caplog):
    found = told(caplog, lambda step: (0.5, 0.0) if step <= 30 else (0.0, 0.5), 100)
    assert list(found) == [15, 36]
    assert "fewer devices" in found[36]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_quick_steps_share_a_line_a_second(caplog):
    clock = Clock()
    progress = RunProgress("sft", Console(file=io.StringIO(), force_terminal=False), clock=clock)
    with caplog.at_level(logging.INFO, logger="rl_launch"):
        for step in range(1, 41):
            clock.now += 0.1
            progress.begin(step, 40)
            progress.finish(step, {"train/loss": 1.0} | ({"val/loss": 2.0} if step == 5 else {}), 0.1)
    told = [int(message.split("/")[0].removeprefix("step ")) for message in caplog.messages]
    assert told == [1, 5, 15, 25, 35, 40]


def test_the_live_line_fits_the_terminal():
    for width in (40, 60, 80, 120):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system=None, width=width)
        progress = RunProgress("grpo-math-8b-megatron", console)
        progress.begin(1000, 1000)
        for step in range(24):
            progress.finish(step, {"reward/mean": step / 7, "train/loss": 1e-5 / 3, "val/accuracy": 1 / 3}, 2000.0)
        progress.phase("weight_sync")
        console.print(progress.render())
        lines = out.getvalue().splitlines()
        assert len(lines) == 1
        assert len(lines[0]) <= width
        assert "step 1000/1000" in lines[0]


def test_the_number_of_replicas_is_told_once_it_has_changed(caplog):
    progress = RunProgress(
        "grpo", Console(file=io.StringIO(), force_terminal=False), clock=itertools.count(0, 10).__next__
    )
    with caplog.at_level(logging.INFO, logger="rl_launch"):
        for step, count in enumerate((1.0, 2.0, 2.0), 1):
            progress.finish(step, {"reward/mean": 0.5, "generation/replicas": count}, 2.0)
    assert ["replicas 2" in text for text in caplog.messages] == [False, True, True]
    assert "replicas" not in caplog.messages[0]
