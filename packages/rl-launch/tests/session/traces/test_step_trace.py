"""Traces of a run: spans of all processes on one clock, by step, without a failure of the run."""

import time

import pytest

from rl_core.tracing import spans
from rl_core.tracing.spans import Span, SpanReport
from rl_launch.run_session.traces.step_trace import Collected, StepTrace
from rl_launch.run_session.traces.trace_folder import trace_files


@pytest.fixture(autouse=True)
def _taken():
    """Spans of other tests are none of these."""
    spans.take()


def report(*found: Span) -> SpanReport:
    return SpanReport(1, "host", "clock", time.monotonic_ns(), found)


def steps(trace: StepTrace, *numbers: int) -> None:
    for step in numbers:
        trace.begin_step(step)
        with spans.span("phases", f"training of {step}"):
            pass
        trace.end_step(step, {})


def events(folder):
    return [event for file in trace_files(folder) for event in file.events() if event["ph"] != "M"]


def test_spans_of_the_driver_and_of_others_are_in_the_file_of_their_step(tmp_path):
    asked = []

    def collect():
        # a process whose clock is an hour behind
        now = time.monotonic_ns() - 3600 * 10**9
        asked.append(now)
        return [Collected("policy-0", report(Span("calls", f"call {len(asked)}", now - 1000, now)), 3600 * 10**9)]

    trace = StepTrace(tmp_path, collect, period_s=0.0)
    steps(trace, 20, 21)
    trace.close()

    names = [event["name"] for event in events(tmp_path)]
    assert {"training of 20", "step 20", "training of 21", "step 21"} <= set(names)
    assert [file.first for file in trace_files(tmp_path)] == [1, 21]
    now = time.time() * 1e6
    for event in events(tmp_path):
        assert now - 60e6 < event["ts"] <= now


def test_what_came_before_is_left_out_except_for_the_restart_that_led_here(tmp_path):
    spans.record("phases", "of a run before", 1, 2)
    spans.mark("restarts", "the run restarts from checkpoint step_3")
    trace = StepTrace(tmp_path, list, period_s=60.0)
    steps(trace, 4)
    trace.close()
    assert {event["name"] for event in events(tmp_path)} == {
        "the run restarts from checkpoint step_3", "training of 4", "step 4"
    }  # fmt: skip


def test_short_steps_are_collected_together(tmp_path):
    count = []
    trace = StepTrace(tmp_path, lambda: count.append(1) or [], period_s=3600.0)
    steps(trace, *range(1, 30))
    trace.close()
    assert len(count) == 1
    assert sum(event["name"].startswith("step ") for event in events(tmp_path)) == 29


def test_a_trace_that_cannot_be_written_ends_with_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    trace = StepTrace(tmp_path / "file" / "traces", list)
    steps(trace, 1, 2)
    trace.close()
    assert "no traces from here" in caplog.text
