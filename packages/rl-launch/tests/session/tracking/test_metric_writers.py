import logging
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import counting_run as counting
import pytest
from tensorboardX import record_writer
from tensorboardX.proto.event_pb2 import Event

from rl_core.config import as_written, load, resolve
from rl_core.errors import ConfigError
from rl_launch.run_session import LoggerConfig, RunSession
from rl_launch.run_session.directory.run_state import Labels
from rl_launch.run_session.tracking import writers
from rl_launch.run_session.tracking.trackers import mlflow_name
from rl_launch.run_session.tracking.writers import MetricWriters, TensorBoardWriter


def scalars(folder):
    """(step, name, value) of every scalar in the event files, and the purge steps, in the order of writing."""
    found, purged = [], []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.session_log.status:
                purged.append(event.step)
    return found, purged


def test_tensorboard_gets_every_metric_of_every_step(tmp_path):
    settings = counting.CountingConfig(logger=LoggerConfig())
    counting.run(tmp_path, settings)
    found, _ = scalars(tmp_path / "logs/tensorboard")
    losses = [(step, value) for step, name, value in found if name == "train/loss"]
    expected = [(row["step"], pytest.approx(row["train/loss"], rel=1e-6)) for row in counting.metrics(tmp_path)]
    assert losses == expected


def test_tensorboard_hides_steps_that_come_again(tmp_path):
    settings = counting.CountingConfig(logger=LoggerConfig())

    def fail(session, step):
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, settings, at_step=fail)
    counting.run(tmp_path, settings)
    _, purged = scalars(tmp_path / "logs/tensorboard")
    saved = (3 // settings.checkpointing.save_period) * settings.checkpointing.save_period
    assert purged[-1] == saved + 1


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_writer_that_is_not_installed_is_refused_before_the_run(tmp_path, name):
    settings = counting.CountingConfig(logger=LoggerConfig.model_validate({f"{name}_enabled": True}))
    try:
        __import__(name)
    except ModuleNotFoundError:
        with (
            pytest.raises(ConfigError, match=rf"pip install 'rl-launch\[{name}\]'"),
            RunSession(tmp_path / "run", settings),
        ):
            pass
        assert not (tmp_path / "run").exists()
    else:
        pytest.skip(f"{name} is installed here")


def raises(error):
    def refuse(*args):
        raise error

    return refuse


@pytest.fixture
def forever(monkeypatch):
    """An event that is set when the test ends, with short waits for writers."""
    for name, value in {"START_WAIT_S": 0.2, "SILENCE_S": 0.2, "END_WAIT_S": 0.2}.items():
        monkeypatch.setattr(writers, name, value)
    event = threading.Event()
    yield event
    event.set()


FAILURES = {
    "raises": lambda forever: raises(ConnectionError("the tracking server is away")),
    "exits": lambda forever: raises(SystemExit(3)),
    "is interrupted": lambda forever: raises(KeyboardInterrupt()),
    "hangs": lambda forever: lambda *args: forever.wait(),
}


@pytest.mark.parametrize("method", ["__init__", "write", "close"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_writer_that_fails_is_reported_once_and_the_run_goes_on(
    tmp_path, monkeypatch, caplog, method, failure, forever
):
    monkeypatch.setattr(TensorBoardWriter, method, FAILURES[failure](forever))
    with caplog.at_level(logging.WARNING):
        session = counting.run(tmp_path, counting.CountingConfig(logger=LoggerConfig()))
    assert session.completed == 6
    assert [row["step"] for row in counting.metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    [told] = [message for message in caplog.messages if message.startswith("TensorBoard ")]
    assert told.endswith("and is turned off; metrics.jsonl has all metrics")
    assert failure != "raises" or "(ConnectionError: the tracking server is away)" in told


@pytest.fixture
def hanging(forever):
    """A writer that hangs in its first step."""
    begun = threading.Event()

    def write(step, metrics):
        begun.set()
        forever.wait()

    made = MetricWriters({"slow": lambda: SimpleNamespace(write=write, close=lambda status: None)})
    made.write(1, {})
    begun.wait()
    return made


def test_a_writer_that_hangs_in_one_step_is_given_up_in_a_later_one(hanging, monkeypatch, caplog):
    monkeypatch.setattr(writers, "SILENCE_S", 0.0)
    hanging.write(2, {})
    hanging.write(3, {})
    hanging.close("finished")
    assert caplog.messages == ["slow has not answered for 0 s and is turned off; metrics.jsonl has all metrics"]


def test_a_writer_that_falls_behind_is_given_up_and_holds_a_bounded_number_of_steps(hanging, monkeypatch, caplog):
    monkeypatch.setattr(writers, "SILENCE_S", float("inf"))
    monkeypatch.setattr(writers, "MAX_WAITING", 3)
    for step in range(2, 9):
        hanging.write(step, {})
    assert caplog.messages == ["slow is 3 steps behind and is turned off; metrics.jsonl has all metrics"]


def test_a_full_disk_turns_tensorboard_off(tmp_path, monkeypatch, caplog):
    full = Path("/dev/full").open("wb")  # noqa: SIM115  # the writer closes it
    monkeypatch.setattr(record_writer, "open_file", lambda path: full)
    session = counting.run(tmp_path, counting.CountingConfig(logger=LoggerConfig()))
    assert session.completed == 6
    [told] = [message for message in caplog.messages if message.startswith("TensorBoard ")]
    assert "No space left on device" in told


def test_tensorboard_reads_the_files_of_a_resumed_run_in_order_if_the_clock_was_set_back(tmp_path):
    (tmp_path / "events.out.tfevents.9000000000.host").write_bytes(b"")
    for _ in range(2):
        TensorBoardWriter(tmp_path, 0).close("finished")
    numbers = [path.name.split(".")[3] for path in sorted(tmp_path.iterdir())]
    assert numbers == ["9000000000", "9000000001", "9000000002"]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("eval/gsm8k/pass@4", "eval/gsm8k/pass_4"),
        ("val/a#2/loss", "val/a_2/loss"),
        ("x" * 300, "x" * 250),
        ("time/step", "time/step"),
    ],
)
def test_mlflow_gets_names_of_its_own_characters(metric, name):
    assert mlflow_name(metric) == name


@pytest.mark.parametrize("name", ["Wandb", "MLflow", "Trackio"])
def test_trackers_are_given_the_names_of_secrets_and_not_their_values(tmp_path, monkeypatch, name):
    given = []
    monkeypatch.setattr(writers, "check_writers", lambda config: None)
    monkeypatch.setattr(
        writers, f"{name}Writer", lambda config, run_dir, settings, labels: given.append(as_written(settings))
    )
    monkeypatch.setenv("TEST_SECRET", "hunter2-of-the-test")
    logger = {f"{name.lower()}_enabled": True, "mlflow": {"tracking_uri": "${oc.env:TEST_SECRET}"}}
    logger["tensorboard_enabled"] = False
    settings = resolve(load({"logger": logger}), counting.CountingConfig).config
    writers.open_writers(settings.logger, tmp_path, settings=settings, after=0, labels=Labels())
    assert given[0]["logger"]["mlflow"]["tracking_uri"] == "${oc.env:TEST_SECRET}"
    assert "hunter2" not in repr(given)
