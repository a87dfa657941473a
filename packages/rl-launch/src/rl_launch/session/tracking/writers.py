"""Metric writers next to `metrics.jsonl`: TensorBoard and the trackers."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rl_core.config import Config, as_written
from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_launch.session.config import LoggerConfig
from rl_launch.session.directory.labels import NO_LABELS, Labels
from rl_launch.session.tracking.trackers import MLflowWriter, TrackioWriter, WandbWriter

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


def open_writers(
    config: LoggerConfig, run_dir: Path, *, settings: Config, after: int, labels: Labels = NO_LABELS
) -> list[MetricWriter]:
    """Return the writers that a config requests. A writer that cannot be started is reported in the log and left out.

    Args:
        config: The `logger` section, which enables writers.
        run_dir: Gives the run its name there, and holds local files in `logs`.
        settings: The run's whole config, to be stored with it.
        after: The step from which the run resumes; records of later steps are discarded.
        labels: Name, group, tags and notes of the run.

    Raises:
        ConfigError: If one needs a package that is not installed, naming the extras.
    """
    check_writers(config)
    opening: list[tuple[str, Callable[[], MetricWriter]]] = []
    if config.tensorboard_enabled:
        opening.append(("TensorBoard", lambda: TensorBoardWriter(run_dir / "logs" / "tensorboard", after=after)))
    if config.wandb_enabled:
        opening.append(("Weights & Biases", lambda: WandbWriter(config, run_dir, as_written(settings), labels)))
    if config.mlflow_enabled:
        opening.append(("MLflow", lambda: MLflowWriter(config, run_dir, as_written(settings), labels)))
    if config.trackio_enabled:
        opening.append(("trackio", lambda: TrackioWriter(config, run_dir, as_written(settings), labels)))
    writers = []
    for name, start in opening:
        try:
            writers.append(start())
        except Exception as error:  # noqa: BLE001  # a tracking server's failure must not cost the run
            _logger.warning(
                "%s could not be started and is turned off (%s: %s); metrics.jsonl has all metrics",
                name,
                type(error).__name__,
                error,
            )
    return writers


def check_writers(config: LoggerConfig) -> None:
    """Refuse a config whose writers are not installed.

    Raises:
        ConfigError: naming the extras.
    """
    wanted = {"wandb": config.wandb_enabled, "mlflow": config.mlflow_enabled, "trackio": config.trackio_enabled}
    missing = [extra for extra, enabled in wanted.items() if enabled and importlib.util.find_spec(extra) is None]
    if missing:
        keys = " and ".join(f"logger.{extra}_enabled" for extra in missing)
        is_true, is_missing = ("is true", "is") if len(missing) == 1 else ("are true", "are")
        extras = ",".join(missing)
        raise ConfigError(
            f"{keys} {is_true}, but {' and '.join(missing)} {is_missing} not installed: "
            f"{install_command(f'rl-launch[{extras}]')}"
        )


class TensorBoardWriter:
    """TensorBoard event files.

    Args:
        folder: Folder for the events.
        after: Later steps of earlier event files are hidden.
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
    """Hide an installed module from imports, because importing it takes a second for values that are never passed."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # as documented for imports that must fail
    try:
        yield
    finally:
        del sys.modules[module]
