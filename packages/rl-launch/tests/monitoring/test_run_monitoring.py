"""Observers of a real session: what they see, and that none of them can harm it."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rl_core.errors import ConfigError
from rl_launch.monitoring.run_monitoring import RunMonitoring
from rl_launch.monitoring.telemetry import Telemetry
from rl_launch.run_session import LoggerConfig, RunSession
from rl_launch.run_session.config import NotifyConfig
from rl_launch.run_session.observer import Observers, RunObserver

sys.path.insert(0, str(Path(__file__).parents[1] / "session"))

import counting_run as counting


class Recorder(RunObserver):
    def __init__(self):
        self.calls = []

    def begin(self, run):
        self.calls.append(("begin", run.name, run.step))

    def start(self, max_steps, history):
        self.calls.append(("start", max_steps, len(history)))

    def begin_step(self, step):
        self.calls.append(("step", step))

    def begin_phase(self, name):
        self.calls.append((name, "begins"))

    def end_phase(self, name):
        self.calls.append((name, "ends"))

    def step_metrics(self):
        return {"system/node0/cpu_utilization": 0.5}

    def end_step(self, step, metrics):
        self.calls.append(("done", step, metrics["train/loss"] != 0, metrics["time/step"] > 0))

    def saved(self, step):
        self.calls.append(("saved", step))

    def end(self, state):
        self.calls.append(("end", state.status, state.reason))


class Broken(RunObserver):
    """Fails wherever it is called first."""

    def __init__(self, method):
        def fail(*args):
            raise RuntimeError("no idea")

        setattr(self, method, fail)


def run(folder, observer, *, max_steps=2, error=None):
    settings = counting.config(max_steps)
    console = Console(file=io.StringIO())
    model, draws = counting.CountingModel(), counting.Draws()
    with RunSession(folder, settings, console=console, observer=observer) as session:
        for step in session.steps(max_steps, models={"policy": model}, state={"draws": draws}):
            with session.phase("training"):
                loss = model.train(draws.draw())
            session.record(step, {"train/loss": loss})
            if error is not None:
                raise error


def test_an_observer_sees_a_run_from_its_beginning_to_its_end(tmp_path):
    recorder = Recorder()
    run(tmp_path / "mine", recorder)
    step = [("training", "begins"), ("training", "ends")]
    assert recorder.calls == [
        ("begin", "mine", 0),
        ("start", 2, 0),
        ("step", 1),
        *step,
        ("done", 1, True, True),
        ("step", 2),
        *step,
        ("done", 2, True, True),
        ("saved", 2),
        ("end", "finished", ""),
    ]
    assert [row["system/node0/cpu_utilization"] for row in counting.metrics(tmp_path / "mine")] == [0.5, 0.5]


def test_an_observer_sees_why_a_run_failed(tmp_path):
    recorder = Recorder()
    with pytest.raises(RuntimeError):
        run(tmp_path, recorder, error=RuntimeError("out of luck\nin detail"))
    assert recorder.calls[-1] == ("end", "failed", "out of luck")


@pytest.mark.parametrize(
    "method", ["begin", "start", "begin_step", "begin_phase", "end_phase", "step_metrics", "end_step", "saved", "end"]
)
def test_an_observer_that_fails_is_turned_off_and_the_run_and_the_others_go_on(tmp_path, caplog, method):
    recorder = Recorder()
    run(tmp_path, Observers([Broken(method), recorder]))
    assert recorder.calls[-1] == ("end", "finished", "")
    assert [record.message for record in caplog.records if "turned off" in record.message] == [
        "Broken is turned off (RuntimeError: no idea)"
    ]


def test_without_settings_nothing_watches_a_run():
    with RunMonitoring(LoggerConfig(), findings=_no_findings, restarts=lambda: False) as monitoring:
        assert monitoring.observer.observers == []


def test_a_notification_of_a_finished_run_is_delivered_before_the_command_ends(tmp_path):
    command = [sys.executable, "-c", "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"]
    config = LoggerConfig(notify=NotifyConfig(command=[*command, str(tmp_path / "told")]))
    with RunMonitoring(config, findings=_no_findings, restarts=lambda: False) as monitoring:
        run(tmp_path / "mine", monitoring.observer)
    assert '"event": "finished"' in (tmp_path / "told").read_text()


@pytest.mark.parametrize("method", ["to", "close"])
def test_spans_that_cannot_be_sent_cost_a_run_nothing(tmp_path, monkeypatch, caplog, method):
    def refuse(*args):
        raise ValueError("no idea")

    monkeypatch.setattr(Telemetry, method, refuse)
    config = LoggerConfig(otel_endpoint="http://127.0.0.1:9")
    with RunMonitoring(config, findings=_no_findings, restarts=lambda: False) as monitoring:
        run(tmp_path / "mine", monitoring.observer)
    assert any("(ValueError: no idea)" in message for message in caplog.messages)
    assert len(counting.metrics(tmp_path / "mine")) == 2


@pytest.mark.parametrize(
    ("key", "value", "module", "extra"),
    [
        ("prometheus_port", 9464, "prometheus_client", "rl-launch[prometheus]"),
        ("otel_endpoint", "http://127.0.0.1:4318", "opentelemetry.sdk.trace", "rl-launch[otel]"),
    ],
)
def test_a_missing_extra_is_one_message(monkeypatch, key, value, module, extra):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == module else found(name, *args))
    with pytest.raises(ConfigError, match=rf"logger\.{key} is set, but .* not installed: .*{extra.partition('[')[0]}"):
        RunMonitoring(LoggerConfig(**{key: value}), findings=_no_findings, restarts=lambda: False)


def _no_findings(rows, config):
    return ()
