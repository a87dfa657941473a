"""Spans of a run, as OpenTelemetry's SDK exports them."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout
from rl_core.run import RunEnd
from rl_launch.monitoring import telemetry
from rl_launch.monitoring.telemetry import ReportingExporter, Telemetry
from rl_launch.run_session.observer import ObservedRun

DONE = RunEnd("finished", "", 2, 2, {})


@pytest.fixture
def traced(tmp_path):
    exporter = InMemorySpanExporter()
    traces = Telemetry(SimpleSpanProcessor(exporter))
    traces.begin(ObservedRun("my run", tmp_path, {}, 0))

    def spans():
        return {
            (span.name, span.attributes.get("rl.step", span.attributes.get("rl.prompt"))): span
            for span in exporter.get_finished_spans()
        }

    return SimpleNamespace(traces=traces, spans=spans, all=exporter.get_finished_spans)


def step(traces, number, *phases):
    traces.begin_step(number)
    for phase in phases:
        traces.begin_phase(phase)
        traces.end_phase(phase)
    traces.end_step(number, {"reward/mean": 0.5, "train/loss": 1.0})


def test_each_step_is_a_trace_of_its_phases_that_links_to_the_run(traced):
    step(traced.traces, 1, "generation", "training", "weight_sync")
    step(traced.traces, 2, "generation")
    traced.traces.end(DONE)
    spans = traced.spans()
    run, first, second = spans["run", 0], spans["step", 1], spans["step", 2]
    assert len({span.context.trace_id for span in (run, first, second)}) == 3
    assert [link.context.span_id for link in first.links] == [run.context.span_id]
    within = [span.name for span in traced.all() if span.parent and span.parent.span_id == first.context.span_id]
    assert within == ["generation", "training", "weight_sync"]
    assert first.attributes["rl.reward/mean"] == 0.5
    assert {span.attributes["rl.run"] for span in traced.all()} == {"my run"}


def test_phases_nest_and_those_before_the_first_step_belong_to_the_run(traced):
    traces = traced.traces
    traces.begin_phase("starting")
    traces.end_phase("starting")
    traces.begin_step(1)
    traces.begin_phase("validation")
    traces.begin_phase("generation")
    traces.end_phase("generation")
    traces.end_phase("validation")
    traces.end_step(1, {})
    traces.end(DONE)
    by_name = {span.name: span for span in traced.all()}
    assert by_name["starting"].parent.span_id == by_name["run"].context.span_id
    assert by_name["generation"].parent.span_id == by_name["validation"].context.span_id


def test_rollouts_are_spans_from_their_submission_within_the_phase_that_takes_them(traced):
    prompt = Prompt("p7", (), np.arange(3, dtype=np.int32), "math")
    group = RolloutGroup.of(prompt, [Rollout.failed(prompt, "it hung"), Rollout.failed(prompt, "it hung")])
    traced.traces.begin_step(1)
    traced.traces.begin_phase("generation")
    traced.traces.end_group(group, 1_000_000_000, 3)
    traced.traces.end_phase("generation")
    traced.traces.end_step(1, {})
    span, generation = (
        traced.spans()["rollouts", "p7"],
        next(each for each in traced.all() if each.name == "generation"),
    )
    assert span.start_time == 1_000_000_000
    assert span.end_time > span.start_time
    assert span.parent.span_id == generation.context.span_id
    assert {
        name: span.attributes[f"rl.{name}"] for name in ("replica", "num_rollouts", "num_failed", "num_sampled")
    } == {"replica": 3, "num_rollouts": 2, "num_failed": 2, "num_sampled": 0}


def test_a_failed_run_ends_its_spans_as_errors_with_the_reason(traced):
    traced.traces.begin_step(3)
    traced.traces.begin_phase("training")
    traced.traces.end(RunEnd("failed", "policy rank 3 died", 2, 10, {}))
    assert {span.name for span in traced.all()} == {"run", "step", "training"}
    assert {(span.status.status_code, span.status.description) for span in traced.all()} == {
        (StatusCode.ERROR, "policy rank 3 died")
    }


def test_a_run_that_is_restored_has_a_second_span(traced, tmp_path):
    traced.traces.end(RunEnd("failed", "a node was lost", 2, 10, {}))
    traced.traces.begin(ObservedRun("my run", tmp_path, {}, 2))
    traced.traces.end(DONE)
    assert [span.attributes["rl.step"] for span in traced.all()] == [0, 2]


def test_a_collector_that_takes_no_spans_is_reported_once_without_its_url(caplog):
    caplog.set_level(logging.INFO, logger="rl_launch")
    results = iter([SpanExportResult.FAILURE, SpanExportResult.FAILURE, SpanExportResult.SUCCESS] * 2)

    class Exporter(SpanExporter):
        def export(self, spans):
            return next(results)

    exporter = ReportingExporter(Exporter(), "http://me:secret@collector:4318")
    for _ in range(6):
        exporter.export([])
    stopped = "the collector of traces at collector takes no spans; they are dropped until it does"
    resumed = "the collector of traces at collector takes spans again"
    assert caplog.messages == [stopped, resumed] * 2


@pytest.mark.parametrize("method", ["force_flush", "shutdown"])
def test_a_collector_that_does_not_answer_does_not_hold_up_the_end_of_a_run(monkeypatch, caplog, method):
    forever = threading.Event()
    monkeypatch.setattr(telemetry, "CLOSE_TIMEOUT_S", 0.05)
    processor = SpanProcessor()
    setattr(processor, method, lambda *args, **named: forever.wait())
    Telemetry(processor).close()
    assert caplog.messages == ["the last spans were not sent within 0.05 s"]
    forever.set()
