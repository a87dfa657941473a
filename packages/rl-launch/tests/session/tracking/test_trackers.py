"""Trackers, with small modules in the place of their packages, and with the packages where they are installed."""

import importlib.util
import json
import struct
import sys
import zipfile
from types import SimpleNamespace

import counting_run as counting
import pytest

from rl_core.errors import ConfigError
from rl_launch.run_session import LoggerConfig, RunSession
from rl_launch.run_session.directory.run_folder import DESCRIPTION
from rl_launch.run_session.directory.run_state import Labels, write_labels
from rl_launch.run_session.tracking import writers
from rl_launch.run_session.tracking.trackers import WandbWriter, check_mlflow_store


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
        self.said = []
        self.is_finished = False

    def define_metric(self, *names, **settings): ...

    def log(self, row, step=None):
        assert not self.is_finished
        self.rows.append((step, row))

    def mark_preempting(self):
        self.said.append("preempting")

    def alert(self, title):
        self.said.append(title)

    def finish(self, **end):
        self.is_finished = True
        self.said += end.values()
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


def fail(session, step):
    if step == 4:
        raise RuntimeError


def interrupt(session, step):
    if step == 4:
        session.stop_request.ask("SIGTERM")


LABELS = {"name": "baseline", "group": "lr", "tags": ["a", "b"], "notes": "why"}


def test_weights_and_biases_gets_the_labels_and_a_resumed_run_continues_it(tmp_path, installed):
    wandb = installed("wandb", of_kind("wandb"))
    given = settings(wandb_enabled=True, wandb={"entity": "team", "mode": "offline"}, **LABELS)

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
    assert [[row["step"] for _, row in run.rows] for run in wandb.made] == [[1, 2, 3], [4, 5, 6]]


def test_weights_and_biases_without_labels_decides_itself(tmp_path, installed):
    wandb = installed("wandb", of_kind("wandb"))
    counting.run(tmp_path / "my-run", settings(wandb_enabled=True))
    [run] = wandb.made
    assert run.settings["name"] == "my-run"
    assert {run.settings[key] for key in ("entity", "group", "tags", "notes", "mode")} == {None}


def test_trackio_gets_every_step_and_a_resumed_run_continues_it(tmp_path, installed, capsys):
    trackio = installed("trackio", of_kind("trackio"))
    given = settings(trackio_enabled=True, trackio={"project": "mine", "space_id": "me/runs"}, **LABELS)

    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given)
    first, second = trackio.made
    assert (first.settings["project"], first.settings["group"]) == ("mine", "lr")
    assert first.settings["space_id"] == "me/runs"
    assert first.settings["name"].startswith("baseline-")
    assert first.settings["name"] == second.settings["name"]
    assert first.settings["resume"] == "allow"
    assert [[step for step, _ in run.rows] for run in trackio.made] == [[1, 2, 3], [4, 5, 6]]
    assert second.rows[0][1]["train/loss"] == counting.metrics(tmp_path)[3]["train/loss"]
    assert first.settings["config"]["tags"] == ["a", "b"]
    assert first.settings["config"]["notes"] == "why"
    assert capsys.readouterr().out == ""


def test_swanlab_gets_every_step_and_a_resumed_run_continues_it(tmp_path, installed, capsys):
    swanlab = installed("swanlab", of_kind("swanlab"))
    given = settings(swanlab_enabled=True, swanlab={"workspace": "team", "mode": "offline"}, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given)
    first, second = swanlab.made
    expected = {"project": "rl", "workspace": "team", "mode": "offline", "name": "baseline", "resume": "allow"}
    labels = {"group": "lr", "tags": ["a", "b"], "description": "why"}
    assert {key: first.settings[key] for key in {**expected, **labels}} == {**expected, **labels}
    assert first.settings["id"] == second.settings["id"]
    assert [[step for step, _ in run.rows] for run in swanlab.made] == [[1, 2, 3], [4, 5, 6]]
    assert capsys.readouterr().out == ""


class ClearMLTask:
    """A task of ClearML, and its class."""

    made: list["ClearMLTask"] = []
    offline = False

    def __init__(self, **settings):
        self.settings, self.rows, self.said = settings, [], []
        self.id = settings["reuse_last_task_id"] or f"task-{len(self.made)}"
        self.flush = self.set_comment = self.connect_configuration = lambda *_, **__: None
        self.report_scalar = lambda title, series, value, iteration: self.rows.append((iteration, title))
        self.mark_failed, self.mark_stopped, self.close = (
            lambda name=name: self.said.append(name) for name in ("failed", "stopped", "closed")
        )

    def get_logger(self):
        return self

    @classmethod
    def init(cls, **settings):
        cls.made.append(cls(**settings))
        return cls.made[-1]

    @classmethod
    def set_offline(cls, value):
        cls.offline = value

    @classmethod
    def is_offline(cls):
        return cls.offline


@pytest.mark.parametrize("offline", [False, True])
def test_clearml_gets_every_step_and_a_resumed_run_continues_its_task(tmp_path, installed, monkeypatch, offline):
    monkeypatch.setattr(ClearMLTask, "made", [])
    monkeypatch.setattr(ClearMLTask, "offline", False)
    installed("clearml", SimpleNamespace(Task=ClearMLTask))
    given = settings(clearml_enabled=True, clearml={"offline": offline}, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given, at_step=interrupt)
    counting.run(tmp_path, given)
    assert [task.said for task in ClearMLTask.made] == [["failed", "closed"], ["stopped", "closed"], ["closed"]]
    assert ClearMLTask.made[0].settings["tags"] == ["a", "b", "lr"]
    reused = [task.settings["reuse_last_task_id"] for task in ClearMLTask.made]
    assert reused == ([False] * 3 if offline else [False, "task-0", "task-0"])
    assert [task.settings.get("continue_last_task") for task in ClearMLTask.made[1:]] == [None if offline else 0] * 2
    steps = [sorted({step for step, _ in task.rows}) for task in ClearMLTask.made]
    assert steps == [[1, 2, 3], [4], [5, 6]]


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
        self.entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda key, value: (key, value))

    def get_tracking_uri(self):
        return "sqlite:///mlflow.db"

    def _client(self, tracking_uri):
        self.opened.append(tracking_uri)
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(
            get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7"),
            create_run=self._create_run,
            get_run=lambda run_id: SimpleNamespace(data=self.runs[run_id]),
            log_dict=lambda *args: None,
            update_run=lambda run_id, **values: self.updates.append(values["status"]),
            set_tag=lambda run_id, key, value: self.runs[run_id].tags.__setitem__(key, value),
            delete_tag=lambda run_id, key: self.runs[run_id].tags.__delitem__(key),
            log_batch=self._log_batch,
            set_terminated=lambda run_id, status: self.updates.append(status),
        )

    def _create_run(self, experiment, run_name):
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(tags={}, params={}, steps=[])
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def _log_batch(self, run_id, metrics=(), params=()):
        run = self.runs[run_id]
        run.steps += [metrics[0][3]] if metrics else []
        assert not {key for key, _ in params} & run.params.keys(), "a parameter is immutable"
        assert len(params) <= 100
        run.params |= dict(params)


def test_mlflow_gets_labels_parameters_and_every_step_once(tmp_path, installed):
    mlflow = installed("mlflow", Mlflow())
    given = settings(mlflow_enabled=True, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    [run] = mlflow.runs.values()
    labels = {"group": "lr", "tags": "a, b", "mlflow.note.content": "why", "a": "true", "b": "true"}
    assert run.tags == {"run_dir": str(tmp_path), **labels}
    assert run.params["logger.tags"] == "['a', 'b']"
    assert "loop.learning_rate" not in run.params
    write_labels(tmp_path / DESCRIPTION, Labels("baseline", "lr", ("b", "c"), "why"))
    loop = given.loop.model_copy(update={"max_num_steps": 7})
    counting.run(tmp_path, given.model_copy(update={"loop": loop}))
    assert run.steps == [1, 2, 3, 4, 5, 6, 7]
    assert run.params["loop.max_num_steps"] == "7"
    assert (run.tags["b"], run.tags["c"], "a" in run.tags) == ("true", "true", False)
    assert mlflow.updates == ["RUNNING", "FAILED", "RUNNING", "FINISHED"]


def test_a_parameter_that_a_resumed_run_changes_becomes_a_tag(tmp_path, installed):
    mlflow = installed("mlflow", Mlflow())
    for steps in (7, 8):
        given = settings(mlflow_enabled=True)
        counting.run(tmp_path, given.model_copy(update={"loop": counting.LoopConfig(max_num_steps=steps)}))
    [run] = mlflow.runs.values()
    assert run.params["loop.max_num_steps"] == "7"
    assert run.tags["resumed.loop.max_num_steps"] == "8"


@pytest.mark.parametrize("value", ["x" * 10_000, "\u00fc" * 700])
def test_a_parameter_is_cut_to_what_every_mlflow_takes(tmp_path, installed, value):
    mlflow = installed("mlflow", Mlflow())
    counting.run(tmp_path, settings(mlflow_enabled=True, notes=value))
    [run] = mlflow.runs.values()
    assert run.params["logger.notes"] == value[:500]


# what each tracker is told of a run that fails at step 4, is told to end there, and finishes
ENDS = {
    "swanlab": (lambda made: [run.said for run in made], [["crashed"], ["aborted"], ["success"]]),
    "wandb": (lambda made: [run.said for run in made], [[1], ["preempting", 75], [0]]),
    "trackio": (lambda made: [run.said for run in made], [["run failed"], ["run interrupted"], []]),
}


@pytest.mark.parametrize("tracker", ENDS)
def test_a_tracker_hears_how_a_run_has_ended(tmp_path, installed, tracker):
    told, expected = ENDS[tracker]
    module = installed(tracker, of_kind(tracker))
    given = settings(**{f"{tracker}_enabled": True})
    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    counting.run(tmp_path, given, at_step=interrupt)
    counting.run(tmp_path, given)
    assert told(module.made) == expected


def test_mlflow_hears_that_a_run_was_interrupted(tmp_path, installed):
    mlflow = installed("mlflow", Mlflow())
    counting.run(tmp_path, settings(mlflow_enabled=True), at_step=interrupt)
    assert mlflow.updates == ["RUNNING", "KILLED"]


def test_a_run_that_is_restored_after_an_error_has_not_failed(tmp_path, installed):
    mlflow = installed("mlflow", Mlflow())
    with pytest.raises(RuntimeError), RunSession(tmp_path, settings(mlflow_enabled=True), restarts=lambda: True):
        raise RuntimeError
    assert mlflow.updates == ["RUNNING", "KILLED"]


def test_a_note_of_the_last_step_that_a_power_cut_has_emptied_does_not_turn_a_tracker_off(tmp_path, installed):
    wandb = installed("wandb", of_kind("wandb"))
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/wandb_step").write_text("")
    writer = WandbWriter(settings().logger, tmp_path / "run", settings(), Labels())
    writer.write(1, {})
    assert len(wandb.made[0].rows) == 1


def test_steps_that_a_tracker_was_not_given_come_when_they_are_made_again(tmp_path, installed, monkeypatch):
    wandb, given = installed("wandb", of_kind("wandb")), settings(wandb_enabled=True)
    log = Tracked.log

    def away(self, row, step=None):
        if row["step"] == 2:
            raise ConnectionError
        log(self, row)

    monkeypatch.setattr(Tracked, "log", away)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path, given, at_step=fail)
    monkeypatch.setattr(Tracked, "log", log)
    counting.run(tmp_path, given)
    assert [[row["step"] for _, row in run.rows] for run in wandb.made] == [[1], [3, 4, 5, 6]]


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
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given = settings(mlflow_enabled=True, mlflow={"tracking_uri": uri}, **LABELS)
    check_mlflow_store(given.logger)
    counting.run(tmp_path / "run", given)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    run = client.get_run((tmp_path / "run/logs/mlflow_run_id").read_text())
    assert (run.info.run_name, run.info.status) == ("baseline", "FINISHED")
    assert client.search_runs([run.info.experiment_id], "tags.a = 'true' and params.`logger.name` = 'baseline'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlartifacts", "mlflow.db", "run"]
    assert [value.step for value in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"cannot write to .*mlruns"):
        check_mlflow_store(settings(mlflow_enabled=True, mlflow={"tracking_uri": str(tmp_path / "mlruns")}).logger)


def test_trackio_itself_keeps_the_steps_of_a_resumed_run_together(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    given = settings(trackio_enabled=True, trackio={"project": "of-a-test"})

    with pytest.raises(RuntimeError):
        counting.run(tmp_path / "run", given, at_step=fail)
    counting.run(tmp_path / "run", given)
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("of-a-test")
    assert name == (tmp_path / "run/logs/trackio_run").read_text()
    assert [row["step"] for row in SQLiteStorage.get_logs("of-a-test", name)] == [1, 2, 3, 4, 5, 6]


def test_weights_and_biases_itself_keeps_how_each_session_ended_and_every_step_once(tmp_path):
    pytest.importorskip("wandb")
    given = settings(wandb_enabled=True, wandb={"mode": "offline"}, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path / "run", given, at_step=fail)
    counting.run(tmp_path / "run", given, at_step=interrupt)
    counting.run(tmp_path / "run", given)
    sessions = [records_of(path) for path in sorted((tmp_path / "run/logs").glob("wandb/offline-run-*/*.wandb"))]
    steps = [[row["step"] for kind, row in session if kind == "history"] for session in sessions]
    assert steps == [[1, 2, 3], [4], [5, 6]]
    assert [[code for kind, code in session if kind == "exit"] for session in sessions] == [[1], [75], [0]]


def test_swanlab_itself_keeps_every_session(tmp_path):
    pytest.importorskip("swanlab")
    given = settings(swanlab_enabled=True, swanlab={"mode": "offline"}, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path / "run", given, at_step=fail)
    counting.run(tmp_path / "run", given)
    [name] = {path.name for path in (tmp_path / "run/logs/swanlab").glob("run-*/run-*.swanlab")}
    assert name == f"run-{(tmp_path / 'run/logs/swanlab_id').read_text()}.swanlab"
    assert (tmp_path / "run/logs/swanlab_step").read_text() == "6"


def test_clearml_itself_keeps_every_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    pytest.importorskip("clearml")
    given = settings(clearml_enabled=True, clearml={"offline": True}, **LABELS)
    with pytest.raises(RuntimeError):
        counting.run(tmp_path / "run", given, at_step=fail)
    counting.run(tmp_path / "run", given)
    found = []
    for archive in sorted((tmp_path / "clearml").glob("offline/*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(archive) as file:
            lines = [
                line for name in file.namelist() if name.endswith(".jsonl") for line in file.read(name).splitlines()
            ]
        events = [event for line in lines for event in json.loads(line)]
        found.append(sorted({event["iter"] for event in events if event.get("metric") == "train/loss"}))
    assert found == [[1, 2, 3], [4, 5, 6]]


def records_of(path):
    """Rows and exit codes in a file of an offline run: a log of LevelDB with a header, here within its first block."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found = path.read_bytes(), 7, []
    assert len(data) < 2**15
    while at < len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        assert kind == 1, "a record is in one piece"
        record, at = Record.FromString(data[at + 7 : at + 7 + length]), at + 7 + length
        match record.WhichOneof("record_type"):
            case "history":
                items = record.history.item
                found.append(
                    ("history", {each.key or each.nested_key[0]: json.loads(each.value_json) for each in items})
                )
            case "exit":
                found.append(("exit", record.exit.exit_code))
    return found
