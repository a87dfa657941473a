"""The endpoint that Prometheus scrapes, in the process that drives the run."""

from __future__ import annotations

import errno
import importlib.util
import logging
import math
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError
from rl_core.install_command import install_command
from rl_core.run import EndStatus, RunEnd
from rl_launch.monitoring.quantities import PREFIX, SystemReadings
from rl_launch.run_session.checkpoints.checkpoints import saved_checkpoints
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.observer import ObservedRun, RunObserver

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger(__name__)

_STATE = {
    "rl_run_start_timestamp_seconds": "Time at which the run was started or restored last",
    "rl_step": "Last complete step",
    "rl_max_steps": "Number of steps of the run",
    "rl_last_step_timestamp_seconds": "Time at which the last step was complete, or the first one began",
    "rl_checkpoint_step": "Step of the newest checkpoint",
    "rl_checkpoint_bytes": "Size of the newest checkpoint",
    "rl_run_state": "0 while the run is driven, 1 if it finished, 2 if it was interrupted, 3 if it failed",
}
_END_STATES: Mapping[EndStatus, float] = {"finished": 1, "interrupted": 2, "failed": 3}
_DISK = {
    "rl_run_dir_free_bytes": "Free space of the file system of the run directory",
    "rl_run_dir_size_bytes": "Size of the file system of the run directory",
}
_STARTS = "rl_run_starts"


def _is_not_finite(value: float) -> float:
    return float(not math.isfinite(value))


_COUNTS: Mapping[str, tuple[str, str, Callable[[float], float]]] = {
    "rl_skipped_updates": ("Updates that were skipped", "train/skipped_steps", float),
    "rl_failed_rollouts": ("Rollouts that failed", "rollout/failed", float),
    "rl_non_finite_rewards": ("Steps whose mean reward is not finite", "reward/mean", _is_not_finite),
    "rl_non_finite_losses": ("Steps whose loss is not finite", "train/loss", _is_not_finite),
}
"""Totals over all steps, which show events between two scrapes: by their names, the meaning, the metric, and the value
that a step adds."""

MAX_LAST_SCRAPE_S = 60.0
"""Timeout in seconds of the wait for a scrape that reads how the run ended."""

RUN_METRICS = (*_STATE, *_DISK, f"{_STARTS}_total", *(f"{name}_total" for name in _COUNTS))
"""Names of the series about a run, in addition to its metrics and readings."""

_REFUSED = re.compile(r"[^a-zA-Z0-9_]+")


def exported_name(metric: str) -> str:
    """Return the name in Prometheus of a metric of `metrics.jsonl`: `rl_` before it, and `_` in place of each run of
    characters other than ASCII letters, digits and `_`: `val/pass@4` is `rl_val_pass_4`.
    """
    return f"rl_{_REFUSED.sub('_', metric).strip('_')}"


class PrometheusEndpoint(RunObserver):
    """Serves the metrics of the last step, and the newest readings, at `http://HOST:PORT/metrics` until it is closed.

    A scrape computes nothing and asks nobody: it shows what is there.

    Args:
        config: The `logger` section; its `prometheus_port` is set.
        readings: Readings of machines, workers and replicas.

    Raises:
        ConfigError: If prometheus-client is not installed, or the port cannot be opened; contains the remedy.
    """

    def __init__(self, config: LoggerConfig, readings: SystemReadings) -> None:
        check_prometheus(config)
        from prometheus_client import CollectorRegistry, start_http_server

        self._readings = readings
        self._lock = threading.Lock()
        self._run: ObservedRun | None = None
        self._metrics: dict[str, float] = {}
        self._state: dict[str, float] = {}
        self._num_sessions = 0
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._scrapes: tuple[float, ...] = ()
        self._end_is_read = threading.Event()
        self._clashes: set[str] = set()
        registry = CollectorRegistry(auto_describe=False)
        assert config.prometheus_port is not None, "the endpoint has a port"
        try:
            self._server, self._thread = start_http_server(
                config.prometheus_port, config.prometheus_host, registry=registry
            )
        except OSError as error:
            raise ConfigError(_not_opened(config, error)) from None
        registry.register(self)
        host = f"[{config.prometheus_host}]" if ":" in config.prometheus_host else config.prometheus_host
        _log.info("metrics for Prometheus: %s", f"http://{host}:{config.prometheus_port}/metrics")

    def begin(self, run: ObservedRun) -> None:
        with self._lock:
            self._run = run
            self._num_sessions += 1
            self._state = {"rl_run_start_timestamp_seconds": time.time(), "rl_step": run.step, "rl_run_state": 0}
            self._state |= _newest_size(run.run_dir)
            self._end_is_read.clear()

    def start(self, max_steps: int, history: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            self._state["rl_max_steps"] = max_steps
            self._state["rl_last_step_timestamp_seconds"] = time.time()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        found: dict[str, str] = {}
        for metric in metrics:
            # these are read more often than once per step, and exported with labels
            if metric.startswith(PREFIX):
                continue
            name = exported_name(metric)
            if name in found and metric not in self._clashes:
                self._clashes.add(metric)
                _log.warning("%s is not exported to Prometheus: its name there is that of %s", metric, found[name])
            found.setdefault(name, metric)
        exported = {name: metrics[metric] for name, metric in found.items()}
        with self._lock:
            # Metrics that only some steps have, such as metrics of a validation, keep their value.
            self._metrics |= exported
            self._state |= {"rl_step": step, "rl_last_step_timestamp_seconds": time.time()}
            for count, (_, metric, of_step) in _COUNTS.items():
                self._counts[count] += of_step(metrics.get(metric, 0.0))

    def saved(self, step: int) -> None:
        assert self._run is not None, "a run that saves has begun"
        size = _newest_size(self._run.run_dir)
        with self._lock:
            self._state |= {"rl_checkpoint_step": step, **size}

    def end(self, state: RunEnd) -> None:
        with self._lock:
            self._state |= {"rl_step": state.step, "rl_run_state": _END_STATES[state.status]}

    def close(self) -> None:
        """Close the port, after the next scrape if the run finished or failed and is scraped regularly. Otherwise
        nobody could tell its end from the death of its driver."""
        wait_s = 0.0
        with self._lock:
            has_ended = self._state.get("rl_run_state") in (_END_STATES["finished"], _END_STATES["failed"])
            if has_ended and len(self._scrapes) == 2 and not self._end_is_read.is_set():
                before, last = self._scrapes
                # scrapes may be a little late
                wait_s = min(MAX_LAST_SCRAPE_S, last + 1.5 * (last - before) - time.monotonic())
        if wait_s > 0:
            _log.info("waiting at most %.0f s for Prometheus to read the end of the run", wait_s)
            self._end_is_read.wait(wait_s)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families of a scrape; called by prometheus-client in the thread that answers it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            run, metrics, state, sessions = self._run, dict(self._metrics), dict(self._state), self._num_sessions
            counts = dict(self._counts)
            self._scrapes = (*self._scrapes[-1:], time.monotonic())
            if state.get("rl_run_state"):
                self._end_is_read.set()
        if run is None:
            return
        gauges = [(name, _STATE[name], value) for name, value in state.items()]
        starts = "Starts of the workers in this process: 1, and one per restoration"
        counters = [(_STARTS, starts, float(sessions))]
        counters += [(name, f"{_COUNTS[name][0]}, since the driver started", value) for name, value in counts.items()]
        with suppress(OSError):
            usage = shutil.disk_usage(run.run_dir)
            gauges += [(*of, float(value)) for of, value in zip(_DISK.items(), (usage.free, usage.total), strict=True)]
        own = {name: value for name, value in metrics.items() if name not in state}
        gauges += [(name, "Metric of the last step that has it", value) for name, value in own.items()]
        for make, found in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, meaning, value in found:
                family = make(name, meaning, labels=["run"])
                family.add_metric([run.name], value)
                yield family
        families: dict[str, Any] = {}
        for reading in self._readings.newest():
            name, is_counter = reading.quantity.exported, reading.quantity.kind == "counter"
            if name not in families:
                make = CounterMetricFamily if is_counter else GaugeMetricFamily
                families[name] = make(name, reading.quantity.meaning, labels=["run", *reading.labels])
            # policies have ranks and generators replicas, so the labels of one family differ
            labels = {"run": run.name, **reading.labels}
            families[name].add_sample(f"{name}_total" if is_counter else name, labels, reading.value)
        yield from families.values()


def _newest_size(run_dir: Path) -> dict[str, float]:
    """Return the metric with the size of the newest checkpoint; empty if there is none that can be read."""
    try:
        *_, (_, newest) = saved_checkpoints(run_dir / "checkpoints")
        files = CheckpointManifest.read(newest).files
    except (OSError, ValueError):
        return {}
    return {"rl_checkpoint_bytes": sum(size for size, _ in files.values())}


def check_prometheus(config: LoggerConfig) -> None:
    """Refuse a config whose endpoint is not installed, or cannot be opened at present.

    Raises:
        ConfigError: naming the extra, or the port with the remedy.
    """
    if config.prometheus_port is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "logger.prometheus_port is set, but prometheus-client is not installed: "
            f"{install_command('rl-launch[prometheus]')}"
        )
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.prometheus_host, config.prometheus_port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            # The server sets it as well, so that a port which was closed a moment ago can be opened.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError(_not_opened(config, error)) from None


def _not_opened(config: LoggerConfig, error: OSError) -> str:
    place = f"port {config.prometheus_port} of {config.prometheus_host}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"logger.prometheus_port: {place} is in use, perhaps by another run. Choose another port"
        case errno.EACCES:
            return f"logger.prometheus_port: {place} needs privileges. Choose a port above 1023"
    return (
        f"logger.prometheus_host: {place} cannot be opened ({error.strerror or error}). Use an address of this "
        "machine, such as 127.0.0.1"
    )
