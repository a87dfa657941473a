"""Metric writers: TensorBoard, Weights & Biases and MLflow, beside `metrics.jsonl`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rl_core.config import Config, as_written
from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_launch.session.atomic_file import write_atomically
from rl_launch.session.config import LoggerConfig

_logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics."""
        ...

    def close(self) -> None:
        """Write what is buffered, and end."""
        ...


class MetricWriters:
    """Several writers as one, none of which can end the run: one that raises is reported in the log and turned off."""

    def __init__(self, writers: Iterable[MetricWriter] = ()) -> None:
        self._writers = list(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a step's metrics to every writer that has not failed."""
        for writer in tuple(self._writers):
            try:
                writer.write(step, metrics)
            except Exception as error:  # noqa: BLE001  # a tracking server's failure must not cost the run
                self._writers.remove(writer)
                _logger.warning(
                    "%s failed at step %d and is turned off (%s: %s); metrics.jsonl has all metrics",
                    type(writer).__name__,
                    step,
                    type(error).__name__,
                    error,
                )

    def close(self) -> None:
        """Close every writer that has not failed."""
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001  # a tracking server's failure must not cost the run
                _logger.warning("%s could not be closed: %s: %s", type(writer).__name__, type(error).__name__, error)
        self._writers = []


def open_writers(config: LoggerConfig, run_dir: Path, *, settings: Config, after: int) -> list[MetricWriter]:
    """The writers a config asks for.

    Args:
        run_dir: gives the run its name there, and holds local files in `logs`.
        settings: the run's whole config, to be stored with it.
        after: the step that the run goes on after; records of later steps are void.

    Raises:
        ConfigError: if one needs a package that is not installed, naming the extra.
    """
    check_writers(config)
    writers: list[MetricWriter] = []
    if config.tensorboard_enabled:
        writers.append(TensorBoardWriter(run_dir / "logs" / "tensorboard", after=after))
    if config.wandb_enabled:
        writers.append(WandbWriter(config, run_dir, as_written(settings)))
    if config.mlflow_enabled:
        writers.append(MLflowWriter(config, run_dir, as_written(settings)))
    return writers


def check_writers(config: LoggerConfig) -> None:
    """Refuse a config whose writers are not installed.

    Raises:
        ConfigError: naming the extra.
    """
    for enabled, module, extra in (
        (config.wandb_enabled, "wandb", "wandb"),
        (config.mlflow_enabled, "mlflow", "mlflow"),
    ):
        if enabled and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"logger.{extra}_enabled is true, but {module} is not installed: "
                f"{install_command(f'rl-launch[{extra}]')}"
            )


class TensorBoardWriter:
    """TensorBoard event files.

    Args:
        folder: for them.
        after: later steps of earlier event files are hidden.
    """

    def __init__(self, folder: Path, *, after: int) -> None:
        # imports protobuf, which only runs that write need
        with _without("torch"):
            from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1, write_to_disk=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Have imports not find a module that is installed: one takes a second, for values that are never passed."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # as documented for imports that must fail
    try:
        yield
    finally:
        del sys.modules[module]


class WandbWriter:
    """A Weights & Biases run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Any) -> None:
        wandb = importlib.import_module("wandb")
        id_file = run_dir / "logs" / "wandb_id"
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.wandb.project,
            name=config.wandb.name or run_dir.name,
            id=id_file.read_text(),
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
    """The name of a metric with `_` in the place of characters that MLflow refuses, such as that of `pass@4`."""
    return re.sub(r"[^/\w.\- :]", "_", metric)


class MLflowWriter:
    """An MLflow run, which a resumed run continues."""

    def __init__(self, config: LoggerConfig, run_dir: Path, settings: Any) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.tracking.MlflowClient(tracking_uri=config.mlflow.tracking_uri)
        self._entities = mlflow.entities
        id_file = run_dir / "logs" / "mlflow_run_id"
        if not id_file.exists():
            write_atomically(id_file, self._create(config, run_dir, settings))
        self._run_id = id_file.read_text()

    def _create(self, config: LoggerConfig, run_dir: Path, settings: Any) -> str:
        name = config.mlflow.experiment_name
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=config.mlflow.run_name or run_dir.name)
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
