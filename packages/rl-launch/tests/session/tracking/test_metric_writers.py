import logging
import struct

import counting_run as counting
import pytest
from tensorboardX.proto.event_pb2 import Event

from rl_core.config import load, resolve
from rl_core.errors import ConfigError
from rl_launch.session import LoggerConfig, RunSession
from rl_launch.session.tracking import writers
from rl_launch.session.tracking.trackers import mlflow_name
from rl_launch.session.tracking.writers import TensorBoardWriter


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


@pytest.mark.parametrize("method", ["write", "close"])
def test_a_writer_that_raises_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog, method):
    asked = []

    def refuse(self, *args):
        asked.append(args)
        raise ConnectionError("the tracking server is away")

    monkeypatch.setattr(TensorBoardWriter, method, refuse)
    with caplog.at_level(logging.WARNING):
        session = counting.run(tmp_path, counting.CountingConfig(logger=LoggerConfig()))
    assert session.completed == 6
    assert [row["step"] for row in counting.metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len(asked) == 1
    told = [record.getMessage() for record in caplog.records if "the tracking server is away" in record.getMessage()]
    assert len(told) == 1
    assert "TensorBoardWriter" in told[0]


def test_a_writer_that_cannot_be_started_is_reported_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(self, *args, **named):
        raise ConnectionError("the tracking server is away")

    monkeypatch.setattr(TensorBoardWriter, "__init__", refuse)
    with caplog.at_level(logging.WARNING):
        session = counting.run(tmp_path, counting.CountingConfig(logger=LoggerConfig()))
    assert session.completed == 6
    assert "TensorBoard could not be started and is turned off (ConnectionError: the tracking server is away)" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("metric", "name"),
    [("eval/gsm8k/pass@4", "eval/gsm8k/pass_4"), ("val/a#2/loss", "val/a_2/loss"), ("time/step", "time/step")],
)
def test_mlflow_gets_names_of_its_own_characters(metric, name):
    assert mlflow_name(metric) == name


@pytest.mark.parametrize("name", ["Wandb", "MLflow", "Trackio"])
def test_trackers_are_given_the_names_of_secrets_and_not_their_values(tmp_path, monkeypatch, name):
    given = []
    monkeypatch.setattr(writers, f"{name}Writer", lambda config, run_dir, settings, labels: given.append(settings))
    monkeypatch.setattr(writers, "check_writers", lambda config: None)
    monkeypatch.setenv("TEST_SECRET", "hunter2-of-the-test")
    logger = {f"{name.lower()}_enabled": True, "mlflow": {"tracking_uri": "${oc.env:TEST_SECRET}"}}
    settings = resolve(load({"logger": logger}), counting.CountingConfig).config
    writers.open_writers(settings.logger, tmp_path, settings=settings, after=0)
    assert given[0]["logger"]["mlflow"]["tracking_uri"] == "${oc.env:TEST_SECRET}"
    assert "hunter2" not in repr(given)
