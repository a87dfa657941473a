"""Metric writers next to `metrics.jsonl`: TensorBoard and the trackers."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_core.run import EndStatus
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.directory.run_state import Labels
from rl_launch.run_session.tracking.trackers import (
    ClearMLWriter,
    MLflowWriter,
    SwanLabWriter,
    TrackioWriter,
    WandbWriter,
)

START_WAIT_S = 20.0
"""Maximum time that a run waits until its writers have started; one that takes longer gets the steps when it has."""

SILENCE_S = 300.0
"""Maximum time in seconds of one call of a writer, which is then turned off."""

END_WAIT_S = 60.0
"""Maximum time that a run which ends waits for its writers."""

UNWOUND_WAIT_S = 5.0
"""The same for a run that ends at once."""

MAX_WAITING = 10_000
"""Steps that may wait for a writer; one that is further behind is turned off."""

_FLUSH_PERIOD_S = 10.0
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")

_logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics."""

    def close(self, status: EndStatus) -> None:
        """Write what is buffered, and note how the run has ended."""


class BackgroundWriter:
    """A writer in a thread that can neither end the run nor hold it up: one that raises anything, does not answer or
    falls behind is reported in the log once and turned off.

    The thread is not one of `concurrent.futures`, whose threads the interpreter waits for at its end.

    Args:
        name: Name for the log.
        start: Returns the writer; called in the thread.
    """

    def __init__(self, name: str, start: Callable[[], MetricWriter]) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[str, Callable[[MetricWriter], None]]] = SimpleQueue()
        self._doing, self._since = "could not be started", time.monotonic()
        self._is_idle = self._is_off = False
        self._has_started, self._has_ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._work, args=(start,), name=f"{name} writer", daemon=True).start()

    def await_start(self, until: float) -> None:
        """Wait until it has started or failed, or until a time of `time.monotonic`."""
        self._has_started.wait(max(0.0, until - time.monotonic()))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics in the thread; return at once."""
        if not self._is_idle and time.monotonic() - self._since > SILENCE_S:
            self._turn_off(f"has not answered for {SILENCE_S:.0f} s")
        elif self._calls.qsize() >= MAX_WAITING:
            self._turn_off(f"is {MAX_WAITING} steps behind")
        if not self._is_off:
            self._calls.put((f"failed at step {step}", lambda writer: writer.write(step, metrics)))

    def begin_close(self, status: EndStatus) -> None:
        """Close the writer after everything that waits; return at once."""
        self._calls.put(("could not be closed", lambda writer: writer.close(status)))

    def await_end(self, until: float, waited_s: float) -> None:
        """Wait until it is closed or off, or until a time of `time.monotonic`; `waited_s` is shown in the log."""
        if not self._is_off and not self._has_ended.wait(max(0.0, until - time.monotonic())):
            self._turn_off(f"was not closed within {waited_s:.0f} s")

    def _work(self, start: Callable[[], MetricWriter]) -> None:
        try:
            writer = start()
            self._has_started.set()
            while not self._is_off and self._doing != "could not be closed":
                self._is_idle = True
                self._doing, call = self._calls.get()
                self._since, self._is_idle = time.monotonic(), False
                call(writer)
        except BaseException as error:  # noqa: BLE001  # a tracker's failure, even SystemExit, must not cost the run
            self._turn_off(f"{self._doing} ({type(error).__name__}: {error})")
        finally:
            self._has_started.set()
            self._has_ended.set()

    def _turn_off(self, why: str) -> None:
        with self._lock:
            is_off, self._is_off = self._is_off, True
        if not is_off:
            _logger.warning("%s %s and is turned off; metrics.jsonl has all metrics", self._name, why)


class MetricWriters:
    """Several writers as one. No writer can end the run or hold it up.

    Args:
        writers: Functions that return them, by name; called in a thread each.
    """

    def __init__(self, writers: Mapping[str, Callable[[], MetricWriter]] | None = None) -> None:
        self._writers = [BackgroundWriter(name, start) for name, start in (writers or {}).items()]
        until = time.monotonic() + START_WAIT_S
        for each in self._writers:
            each.await_start(until)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a step's metrics to every writer that is not off."""
        for each in self._writers:
            each.write(step, metrics)

    def close(self, status: EndStatus, *, at_once: bool = False) -> None:
        """Close all writers at the same time; further calls have no effect.

        Args:
            status: How the run has ended.
            at_once: True to wait only briefly.
        """
        writers, self._writers = self._writers, []
        wait_s = UNWOUND_WAIT_S if at_once else END_WAIT_S
        until = time.monotonic() + wait_s
        for each in writers:
            each.begin_close(status)
        for each in writers:
            each.await_end(until, wait_s)


def open_writers(config: LoggerConfig, run_dir: Path, *, settings: Config, after: int, labels: Labels) -> MetricWriters:
    """Return the writers that a config requests. A writer that cannot be started is reported in the log and left out.

    Args:
        config: The `logger` section, which enables writers.
        run_dir: Gives the run its name there, and holds local files in `logs`.
        settings: The run's whole config, to be stored with it.
        after: The last complete step of a resumed run; records of later steps are discarded.
        labels: Name, group, tags and notes of the run.

    Raises:
        ConfigError: If one needs a package that is not installed, naming the extras.
    """
    check_writers(config)
    wanted: dict[str, tuple[bool, Callable[[], MetricWriter]]] = {
        "TensorBoard": (config.tensorboard_enabled, lambda: TensorBoardWriter(run_dir / "logs/tensorboard", after)),
        "Weights & Biases": (config.wandb_enabled, lambda: WandbWriter(config, run_dir, settings, labels)),
        "MLflow": (config.mlflow_enabled, lambda: MLflowWriter(config, run_dir, settings, labels)),
        "trackio": (config.trackio_enabled, lambda: TrackioWriter(config, run_dir, settings, labels)),
        "SwanLab": (config.swanlab_enabled, lambda: SwanLabWriter(config, run_dir, settings, labels)),
        "ClearML": (config.clearml_enabled, lambda: ClearMLWriter(config, run_dir, settings, labels)),
    }
    if config.tensorboard_enabled:
        # It imports protobuf, which only runs that write need, and torch, which takes a second for values that are
        # never passed. A None makes an import fail, as documented.
        hides_torch = "torch" not in sys.modules
        if hides_torch:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            importlib.import_module("tensorboardX")
        finally:
            if hides_torch:
                del sys.modules["torch"]
    return MetricWriters({name: start for name, (is_enabled, start) in wanted.items() if is_enabled})


def check_writers(config: LoggerConfig) -> None:
    """Refuse a config whose writers are not installed.

    Raises:
        ConfigError: naming the extras.
    """
    extras = ("wandb", "mlflow", "trackio", "swanlab", "clearml")
    wanted = [extra for extra in extras if getattr(config, f"{extra}_enabled")]
    missing = [extra for extra in wanted if importlib.util.find_spec(extra) is None]
    if missing:
        keys = " and ".join(f"logger.{extra}_enabled" for extra in missing)
        is_true, is_missing = ("is true", "is") if len(missing) == 1 else ("are true", "are")
        command = install_command(f"rl-launch[{','.join(missing)}]")
        raise ConfigError(f"{keys} {is_true}, but {' and '.join(missing)} {is_missing} not installed: {command}")


class TensorBoardWriter:
    """TensorBoard event files. The calling thread writes them: the thread of tensorboardX's own writer ends at the
    first write that fails, and then the next call would wait forever.

    Args:
        folder: Folder for the events.
        after: Later steps of earlier event files are hidden.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, and the clock may have been set back
        numbers = [int(found[1]) for path in folder.iterdir() if (found := _EVENTS.match(path.name))]
        number = max([int(time.time()), *(each + 1 for each in numbers)])
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"))
        self._flush_at = 0.0
        self._write(0, file_version="brain.Event:2")
        self._write(after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        values = [value for name, number in metrics.items() for value in scalar(name, float(number)).value]
        self._write(step, summary=Summary(value=values))

    def close(self, status: EndStatus) -> None:
        """Write out and close."""
        self._records.flush()
        self._records.close()

    def _write(self, step: int, **content: object) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        if time.monotonic() >= self._flush_at:
            self._records.flush()
            self._flush_at = time.monotonic() + _FLUSH_PERIOD_S
