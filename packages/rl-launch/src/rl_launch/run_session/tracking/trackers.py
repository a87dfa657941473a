"""Trackers: Weights & Biases, MLflow, trackio, SwanLab and ClearML. A resumed run continues its run there.

None of them can remove a step, so a step that a resumed run makes again is left out: `logs/NAME_step` of the run
directory has the last step that a tracker was given.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from rl_core.config import Config, as_written, changed_as_written
from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_core.run import EndStatus
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.directory.run_state import Labels
from rl_launch.run_session.directory.writable import write_atomically

_NOTES = "mlflow.note.content"
"""Tag that MLflow shows as the description of a run."""

_CREDENTIALS = re.compile(r"//[^@/\s]*@")
"""User and password in an address."""


_EXIT_CODES: Mapping[EndStatus, int] = {"finished": 0, "failed": 1, "interrupted": os.EX_TEMPFAIL}
_SWANLAB_STATES: Mapping[EndStatus, str] = {"finished": "success", "failed": "crashed", "interrupted": "aborted"}
_MLFLOW_STATUS: Mapping[EndStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_MAX_PARAMETER = 500
"""Characters of a parameter that every version of MLflow takes."""

_PARAMETERS_PER_CALL = 100
_MAX_NAME = 250

_LABELS = "tags"
"""Tag of MLflow that lists the labels which are tags themselves."""

_logger = logging.getLogger(__name__)


class WandbWriter:
    """A Weights & Biases run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Config, labels: Labels) -> None:
        wandb = importlib.import_module("wandb")
        # its hook at the end of the process would otherwise wait for the network without a limit
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
        self._given = _GivenSteps(run_dir, "wandb")
        self._run = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            name=config.wandb.name or labels.name or run_dir.name,
            group=labels.group or None,
            tags=list(labels.tags) or None,
            notes=labels.notes or None,
            mode=config.wandb.mode,
            id=_identity(run_dir, "wandb_id", lambda: uuid.uuid4().hex),
            resume="allow",
            dir=str(run_dir / "logs"),
            config=as_written(settings),
        )
        # its own counter never goes back, a resumed run's steps do
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row for a step."""
        if self._given.is_new(step):
            self._run.log({"step": step, **metrics})

    def close(self, status: EndStatus) -> None:
        """Upload and end. A run that can be resumed is shown as preempted."""
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[status])


def mlflow_name(metric: str) -> str:
    """Return the name of a metric or tag with `_` in place of characters that MLflow refuses, as in `pass@4`, and of a
    length that it takes."""
    return re.sub(r"[^/\w.\- :]", "_", metric)[:_MAX_NAME]


def check_mlflow_store(config: LoggerConfig) -> None:
    """Open the database that MLflow would write to, if it is one; a server is tried when the run has started.

    Raises:
        ConfigError: If MLflow cannot write there, with the remedy.
    """
    if not config.mlflow_enabled:
        return
    mlflow = importlib.import_module("mlflow")
    uri = config.mlflow.tracking_uri or mlflow.get_tracking_uri()
    if re.match(r"https?://|databricks|uc:", uri):
        return
    try:
        mlflow.tracking.MlflowClient(tracking_uri=uri).get_experiment_by_name(config.mlflow.experiment_name)
    except Exception as error:  # noqa: BLE001  # of any library that a store is made of
        said = f"{uri} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise ConfigError(
            f"logger.mlflow.tracking_uri: MLflow cannot write to {_CREDENTIALS.sub('//...@', said)}. Use a "
            "database (sqlite:////FOLDER/mlflow.db, without MLFLOW_TRACKING_URI a file mlflow.db in the current "
            f"folder) or a server (http://...); databases need {install_command('rl-launch[mlflow]')}"
        ) from None


class MLflowWriter:
    """An MLflow run, which a resumed run continues. Its parameters are the keys that differ from their defaults."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Config, labels: Labels) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.tracking.MlflowClient(tracking_uri=config.mlflow.tracking_uri)
        self._entities = mlflow.entities
        self._given = _GivenSteps(run_dir, "mlflow")
        name = config.mlflow.run_name or labels.name or run_dir.name
        database = config.mlflow.tracking_uri or mlflow.get_tracking_uri()
        is_new = not (run_dir / "logs" / "mlflow_run_id").exists()
        self._run_id = _identity(run_dir, "mlflow_run_id", lambda: self._create(config, name, database))
        self._client.update_run(self._run_id, status="RUNNING", name=name)
        known = self._client.get_run(self._run_id).data
        # Set tags, and one tag for each label, which is removed when the label is.
        tags = {"run_dir": str(run_dir), "group": labels.group, _NOTES: labels.notes}
        names = {mlflow_name(label) for label in labels.tags}
        earlier = {mlflow_name(label) for label in known.tags.get(_LABELS, "").split(", ") if label}
        for gone in earlier - names:
            if known.tags.get(gone) == "true":
                self._client.delete_tag(self._run_id, gone)
        own = {**tags, _LABELS: ", ".join(labels.tags)}
        for key, value in {**dict.fromkeys(sorted(names), "true"), **own}.items():
            if value or key in known.tags:
                self._client.set_tag(self._run_id, key, value)
        # Log parameters. One cannot be changed, so the new value of a resumed run becomes a tag.
        parameters = _flattened(changed_as_written(settings))
        new = [self._entities.Param(key, value) for key, value in parameters.items() if key not in known.params]
        for first in range(0, len(new), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAMETERS_PER_CALL])
        for key, value in parameters.items():
            if known.params.get(key, value) != value:
                self._client.set_tag(self._run_id, f"resumed.{key}", value)
        if is_new:
            try:
                self._client.log_dict(self._run_id, as_written(settings), "config.json")
            except Exception as error:  # noqa: BLE001  # the folder may be one of another machine
                _logger.warning("MLflow has no config.json of this run: %s: %s", type(error).__name__, error)

    def _create(self, config: LoggerConfig, name: str, database: str) -> str:
        experiment_name = config.mlflow.experiment_name
        known = self._client.get_experiment_by_name(experiment_name)
        found = re.match(r"sqlite(?:\+\w+)?:///(.+)", database)
        folder = Path(found[1]).absolute().parent if found else None
        place = (
            None
            if folder is None
            else (folder / "mlartifacts" / mlflow_name(experiment_name).replace("/", "_")).as_uri()
        )
        experiment = (
            known.experiment_id if known else self._client.create_experiment(experiment_name, artifact_location=place)
        )
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one value for each metric of a step."""
        if not self._given.is_new(step):
            return
        now = int(time.time() * 1000)
        values = [self._entities.Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self, status: EndStatus) -> None:
        """Note how the run has ended."""
        self._client.set_terminated(self._run_id, status=_MLFLOW_STATUS[status])


class TrackioWriter:
    """A trackio run, which a resumed run continues. trackio finds it by its name, which has a suffix for that."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Config, labels: Labels) -> None:
        trackio = importlib.import_module("trackio")
        name = config.trackio.name or labels.name or run_dir.name
        self._given = _GivenSteps(run_dir, "trackio")
        shown = {"tags": list(labels.tags), "notes": labels.notes}
        # what trackio prints is not output of the command
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=config.trackio.project,
                name=_identity(run_dir, "trackio_run", lambda: f"{name}-{uuid.uuid4().hex[:4]}"),
                group=labels.group or None,
                space_id=config.trackio.space_id,
                config={**as_written(settings), **{key: value for key, value in shown.items() if value}},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row for a step."""
        if self._given.is_new(step):
            self._run.log(dict(metrics), step=step)

    def close(self, status: EndStatus) -> None:
        """Write out and end. trackio has no status of runs, so a run that did not finish has an alert."""
        with redirect_stdout(sys.stderr):
            if status != "finished":
                self._run.alert(f"run {status}")
            self._run.finish()


class SwanLabWriter:
    """A SwanLab run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Config, labels: Labels) -> None:
        swanlab = importlib.import_module("swanlab")
        self._given = _GivenSteps(run_dir, "swanlab")
        with redirect_stdout(sys.stderr):
            self._run = swanlab.init(
                project=config.swanlab.project,
                workspace=config.swanlab.workspace,
                name=config.swanlab.name or labels.name or run_dir.name,
                group=labels.group or None,
                tags=list(labels.tags) or None,
                description=labels.notes or None,
                mode=config.swanlab.mode,
                id=_identity(run_dir, "swanlab_id", lambda: uuid.uuid4().hex[:21]),
                resume="allow",
                log_dir=str(run_dir / "logs" / "swanlab"),
                config=as_written(settings),
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row for a step."""
        if self._given.is_new(step):
            self._run.log(dict(metrics), step=step)

    def close(self, status: EndStatus) -> None:
        """Upload and end."""
        with redirect_stdout(sys.stderr):
            self._run.finish(state=_SWANLAB_STATES[status])


class ClearMLWriter:
    """A ClearML task, which a resumed run continues; without a server, each session is a task of its own."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Config, labels: Labels) -> None:
        task_type = importlib.import_module("clearml").Task
        self._given = _GivenSteps(run_dir, "clearml")
        place = run_dir / "logs" / "clearml_id"
        with redirect_stdout(sys.stderr):
            if config.clearml.offline:
                task_type.set_offline(True)
            known = None if task_type.is_offline() or not place.exists() else place.read_text(encoding="utf-8")
            # ClearML would add the last step of the task to every later one.
            earlier = {"reuse_last_task_id": known, "continue_last_task": 0} if known else {"reuse_last_task_id": False}
            self._task = task_type.init(
                project_name=config.clearml.project,
                task_name=config.clearml.name or labels.name or run_dir.name,
                tags=[*labels.tags, *([labels.group] if labels.group else [])] or None,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=False,
                auto_resource_monitoring=False,
                auto_connect_streams=False,
                **earlier,
            )
        write_atomically(place, self._task.id)
        self._task.set_comment(labels.notes)
        self._task.connect_configuration(as_written(settings), name="config")
        self._logger = self._task.get_logger()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one value for each metric of a step."""
        if self._given.is_new(step):
            for name, value in metrics.items():
                self._logger.report_scalar(name, name, float(value), step)

    def close(self, status: EndStatus) -> None:
        """Upload and end."""
        self._task.flush(wait_for_uploads=True)
        if status == "failed":
            self._task.mark_failed()
        elif status == "interrupted":
            self._task.mark_stopped()
        with redirect_stdout(sys.stderr):
            self._task.close()


class _GivenSteps:
    """Finds out whether a tracker was given a step before, in this or an earlier session of the run."""

    def __init__(self, run_dir: Path, tracker: str) -> None:
        self._path = run_dir / "logs" / f"{tracker}_step"
        try:
            self._last = int(self._path.read_text())
        except (FileNotFoundError, ValueError):  # a power cut may have left it empty
            self._last = -1

    def is_new(self, step: int) -> bool:
        """Return whether a step is new, and note it. It is noted first, so that no kill makes it a step given twice."""
        if step <= self._last:
            return False
        self._last = step
        # The tracker may still get its steps on a failing disk.
        with suppress(OSError):
            aside = self._path.with_name(f"{self._path.name}.part")
            aside.write_text(str(step))
            aside.replace(self._path)
        return True


def _flattened(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values of nested plain values by dotted key, as parameters of MLflow."""
    if not isinstance(tree, dict) or not tree:
        return {mlflow_name(path): str(tree)[:_MAX_PARAMETER]} if path else {}
    below = (_flattened(value, f"{path}.{key}" if path else str(key)) for key, value in tree.items())
    return {key: value for part in below for key, value in part.items()}


def _identity(run_dir: Path, file: str, create: Callable[[], str]) -> str:
    """Return the identity of a run in a tracker, which its folder keeps."""
    path = run_dir / "logs" / file
    if not path.exists():
        write_atomically(path, create())
    return path.read_text(encoding="utf-8")
