"""Trackers: Weights & Biases, MLflow and trackio. A resumed run continues its run there."""

from __future__ import annotations

import importlib
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_launch.session.config import LoggerConfig
from rl_launch.session.directory.atomic_file import write_atomically
from rl_launch.session.directory.labels import Labels

_NOTES = "mlflow.note.content"
"""Tag that MLflow shows as the description of a run."""

_CREDENTIALS = re.compile(r"//[^@/\s]*@")
"""User and password in an address."""


class WandbWriter:
    """A Weights & Biases run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Any, labels: Labels) -> None:
        wandb = importlib.import_module("wandb")
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
            config=settings,
        )
        # its own counter never goes back, a resumed run's steps do
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row per step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Upload and end."""
        self._run.finish()


def mlflow_name(metric: str) -> str:
    """Return the name of a metric with `_` in place of characters that MLflow refuses, as in `pass@4`."""
    return re.sub(r"[^/\w.\- :]", "_", metric)


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
    """An MLflow run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Any, labels: Labels) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.tracking.MlflowClient(tracking_uri=config.mlflow.tracking_uri)
        self._entities = mlflow.entities
        name = config.mlflow.run_name or labels.name or run_dir.name
        self._run_id = _identity(run_dir, "mlflow_run_id", lambda: self._create(config, name, settings))
        self._client.update_run(self._run_id, status="RUNNING", name=name)
        for key, value in {"group": labels.group, "tags": ", ".join(labels.tags), _NOTES: labels.notes}.items():
            if value:
                self._client.set_tag(self._run_id, key, value)

    def _create(self, config: LoggerConfig, name: str, settings: Any) -> str:
        experiment_name = config.mlflow.experiment_name
        known = self._client.get_experiment_by_name(experiment_name)
        experiment = known.experiment_id if known else self._client.create_experiment(experiment_name)
        run = self._client.create_run(experiment, run_name=name)
        self._client.log_dict(run.info.run_id, settings, "config.json")
        return str(run.info.run_id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One value per metric and step."""
        now = int(time.time() * 1000)
        values = [self._entities.Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class TrackioWriter:
    """A trackio run, which a resumed run continues. trackio finds it by its name, which has a suffix for that."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Any, labels: Labels) -> None:
        trackio = importlib.import_module("trackio")
        name = config.trackio.name or labels.name or run_dir.name
        # what trackio prints is not output of the command
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=config.trackio.project,
                name=_identity(run_dir, "trackio_run", lambda: f"{name}-{uuid.uuid4().hex[:4]}"),
                group=labels.group or None,
                space_id=config.trackio.space_id,
                config=settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row per step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out and end."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _identity(run_dir: Path, file: str, create: Callable[[], str]) -> str:
    """The identity of a run in a tracker, which its folder keeps."""
    path = run_dir / "logs" / file
    if not path.exists():
        write_atomically(path, create())
    return path.read_text(encoding="utf-8")
