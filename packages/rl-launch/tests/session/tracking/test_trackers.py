"""Trackers, with small modules in the place of their packages, and with the packages where they are installed."""

import importlib.util
import sys
from types import SimpleNamespace

import counting_run as counting
import pytest

from rl_core.errors import ConfigError
from rl_launch.session import LoggerConfig
from rl_launch.session.directory.labels import Labels, write_labels
from rl_launch.session.directory.run_folder import DESCRIPTION
from rl_launch.session.tracking import writers
from rl_launch.session.tracking.trackers import check_mlflow_store


@pytest.fixture
def installed(monkeypatch):
    """Have a module stand in for a package."""

    def stand_in(name, module):
        monkeypatch.setitem(sys.modules, name, module)
        found = importlib.util.find_spec
        monkeypatch.setattr(writers.importlib.util, "find_spec", lambda each: object() if each == name else found(each))
        return module

    return stand_in


class Tracked:
    """A run of Weights & Biases or trackio."""

    def __init__(self, **settings):
        self.settings = settings
        self.rows = []
        self.is_finished = False

    def define_metric(self, *names, **settings): ...

    def log(self, row, step=None):
        assert not self.is_finished
        self.rows.append((step, row))

    def finish(self):
        self.is_finished = True
        sys.stdout.write("finished")


def of_kind(kind):
    made = []

    def init(**settings):
        sys.stdout.write("started")
        made.append(Tracked(**settings))
        return made[-1]

    return SimpleNamespace(init=init, made=made, kind=kind)


def settings(**logger):
    return counting.CountingConfig(logger=LoggerConfig.model_validate({"tensorboard_enabled": False, **logger}))


LABELS = {"name": "baseline", "group": "lr", "tags": ["a", "b"], "notes": "why"}


def test_weights_and_biases_gets_the_labels_and_a_resumed_run_continues_it(tmp_path, installed):
    wandb = installed("wandb", of_kind("wandb"))
    given = settings(wandb_enabled=True, wandb={"entity": "team", "mode": "offline"}, **LABELS)

    def fail(session, step):
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    write_labels(tmp_path / DESCRIPTION, Labels("baseline", "lr", ("edited",), "why"))
    counting.run(tmp_path, given)
    first, second = (run.settings for run in wandb.made)
    expected = {"project": "rl", "entity": "team", "mode": "offline", "name": "baseline", "group": "lr", "notes": "why"}
    assert {key: first[key] for key in expected} == expected
    assert (first["tags"], second["tags"]) == (["a", "b"], ["edited"])
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert all(run.is_finished for run in wandb.made)
    assert [row["step"] for _, row in wandb.made[1].rows] == [3, 4, 5, 6]


def test_weights_and_biases_without_labels_decides_itself(tmp_path, installed):
    wandb = installed("wandb", of_kind("wandb"))
    counting.run(tmp_path / "my-run", settings(wandb_enabled=True))
    [run] = wandb.made
    assert run.settings["name"] == "my-run"
    assert {run.settings[key] for key in ("entity", "group", "tags", "notes", "mode")} == {None}


def test_trackio_gets_every_step_and_a_resumed_run_continues_it(tmp_path, installed, capsys):
    trackio = installed("trackio", of_kind("trackio"))
    given = settings(trackio_enabled=True, trackio={"project": "mine", "space_id": "me/runs"}, **LABELS)

    def fail(session, step):
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given)
    first, second = trackio.made
    assert (first.settings["project"], first.settings["group"]) == ("mine", "lr")
    assert first.settings["space_id"] == "me/runs"
    assert first.settings["name"].startswith("baseline-")
    assert first.settings["name"] == second.settings["name"]
    assert first.settings["resume"] == "allow"
    assert [step for step, _ in second.rows] == [3, 4, 5, 6]
    assert second.rows[0][1]["train/loss"] == counting.metrics(tmp_path)[2]["train/loss"]
    assert first.is_finished
    assert capsys.readouterr().out == ""


def test_two_runs_of_one_name_are_two_in_trackio(tmp_path, installed):
    trackio = installed("trackio", of_kind("trackio"))
    for folder in ("a", "b"):
        counting.run(tmp_path / folder, settings(trackio_enabled=True, name="same"))
    assert len({run.settings["name"] for run in trackio.made}) == 2


class Mlflow:
    """A tracking server with one store, which may refuse to be opened."""

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.opened = []
        self.runs = {}
        self.updates = []
        self.tracking = SimpleNamespace(MlflowClient=self._client)
        self.entities = SimpleNamespace(Metric=lambda *values: values)

    def get_tracking_uri(self):
        return "sqlite:///mlflow.db"

    def _client(self, tracking_uri):
        self.opened.append(tracking_uri)
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(
            get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7"),
            create_run=self._create_run,
            log_dict=lambda *args: None,
            update_run=lambda run_id, **values: self.updates.append((run_id, values)),
            set_tag=lambda run_id, key, value: self.runs[run_id].__setitem__(key, value),
            log_batch=lambda run_id, metrics: self.runs[run_id].setdefault("steps", []).append(metrics[0][3]),
            set_terminated=lambda run_id: self.updates.append((run_id, "ended")),
        )

    def _create_run(self, experiment, run_name):
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = {"name": run_name}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))


def test_mlflow_gets_the_labels_and_a_resumed_run_continues_it(tmp_path, installed):
    mlflow = installed("mlflow", Mlflow())
    given = settings(mlflow_enabled=True, **LABELS)

    def fail(session, step):
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given)
    [run] = mlflow.runs.values()
    tags = {"group": "lr", "tags": "a, b", "mlflow.note.content": "why"}
    assert run == {"name": "baseline", "steps": [1, 2, 3, 3, 4, 5, 6], **tags}
    running = ("run-0", {"status": "RUNNING", "name": "baseline"})
    assert mlflow.updates == [running, ("run-0", "ended"), running, ("run-0", "ended")]


def test_a_store_that_mlflow_cannot_open_is_refused_before_the_run(installed):
    installed("mlflow", Mlflow(ValueError("unsupported URI 'postgresql://me:secret@host'\nand more")))
    logger = settings(mlflow_enabled=True, mlflow={"tracking_uri": "postgresql://me:secret@host"}).logger
    with pytest.raises(ConfigError) as refused:
        check_mlflow_store(logger)
    text = str(refused.value)
    assert text.startswith(
        "logger.mlflow.tracking_uri: MLflow cannot write to postgresql://...@host (ValueError: unsupported URI "
        "'postgresql://...@host')"
    )
    assert "pip install 'rl-launch[mlflow]'" in text
    assert "secret" not in text


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1", "https://host", "databricks"])
def test_a_server_is_not_waited_for_before_the_run(installed, uri):
    mlflow = installed("mlflow", Mlflow())
    check_mlflow_store(settings(mlflow_enabled=True, mlflow={"tracking_uri": uri}).logger)
    assert mlflow.opened == []


def test_the_default_store_is_tried(installed):
    mlflow = installed("mlflow", Mlflow())
    check_mlflow_store(settings(mlflow_enabled=True).logger)
    assert mlflow.opened == ["sqlite:///mlflow.db"]


def test_mlflow_itself_writes_into_a_database_and_refuses_folders(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where it puts config.json
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given = settings(mlflow_enabled=True, mlflow={"tracking_uri": uri}, **LABELS)
    check_mlflow_store(given.logger)
    counting.run(tmp_path / "run", given)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    run = client.get_run((tmp_path / "run/logs/mlflow_run_id").read_text())
    assert (run.info.run_name, run.info.status) == ("baseline", "FINISHED")
    assert [value.step for value in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"cannot write to .*mlruns"):
        check_mlflow_store(settings(mlflow_enabled=True, mlflow={"tracking_uri": str(tmp_path / "mlruns")}).logger)


def test_trackio_itself_keeps_the_steps_of_a_resumed_run_together(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    given = settings(trackio_enabled=True, trackio={"project": "of-a-test"})

    def fail(session, step):
        if step == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        counting.run(tmp_path / "run", given, at_step=fail)
    counting.run(tmp_path / "run", given)
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("of-a-test")
    assert name == (tmp_path / "run/logs/trackio_run").read_text()
    assert {row["step"] for row in SQLiteStorage.get_logs("of-a-test", name)} == {1, 2, 3, 4, 5, 6}
