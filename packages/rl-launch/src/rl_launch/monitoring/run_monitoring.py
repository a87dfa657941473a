"""Everything that watches a run, by its config, and the readings of its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from rl_core.rollouts.group import RolloutGroup
from rl_launch.monitoring.notifications import Findings, Notifications, check_command
from rl_launch.monitoring.prometheus import PrometheusEndpoint, check_prometheus
from rl_launch.monitoring.quantities import SystemReadings
from rl_launch.monitoring.telemetry import Telemetry, check_telemetry
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.observer import Observers, RunObserver

if TYPE_CHECKING:
    from rl_launch.monitoring.poller import Monitored, Poller


ASK_TIMEOUT_S = 0.25
"""Maximum time that a step waits for readings, if it was too short to have any."""


_log = logging.getLogger(__name__)


class SystemMonitor(RunObserver):
    """Reads the workers of a run in the background, and gives each step what was read during it.

    Args:
        period_s: Seconds between two readings.
        records: True if readings become metrics of the steps; otherwise only `readings` has them.

    Attributes:
        readings: Readings of the workers.
    """

    def __init__(self, *, period_s: float, records: bool) -> None:
        self.readings = SystemReadings()
        self._period_s = period_s
        self._records = records
        self._poller: Poller | None = None

    @contextmanager
    def watching(self, workers: Callable[[], Sequence[Monitored]]) -> Iterator[None]:
        """Read workers while the context is open; it ends before they do.

        Args:
            workers: Returns the workers of the run at present; called in another thread.
        """
        # imports Ray, which checks that fail should not wait for
        from rl_launch.monitoring.poller import Poller

        if self._poller is None:
            self._poller = Poller(self.readings, period_s=self._period_s)
        self._poller.start(workers)
        try:
            yield
        finally:
            self._poller.stop()
            self.readings.forget_all()

    def begin_step(self, step: int) -> None:
        """Leave out what was read before the step."""
        self.readings.take()

    def step_metrics(self) -> Mapping[str, float]:
        """Return the mean and the maximum of the readings of the step."""
        if not self._records:
            self.readings.take()
            return {}
        if self._poller is not None and not self.readings.has_any:
            self._poller.ask_now(ASK_TIMEOUT_S)
        return self.readings.take()


class MonitoredPool(Protocol):
    """The rollout workers of a run, as monitoring sees them."""

    on_group: Callable[[RolloutGroup, int, int], None] | None


class MonitoredRuntime(Protocol):
    """The processes of a run, as monitoring sees them."""

    @property
    def rollout_pool(self) -> MonitoredPool | None:
        """Its rollout workers, if it has some."""

    def monitored(self) -> Sequence[Monitored]:
        """Return the workers at present; called in any thread."""


def check_monitoring(config: LoggerConfig) -> None:
    """Refuse a config whose monitoring cannot work on this machine.

    Raises:
        ConfigError: If something is not installed; contains the remedy.
    """
    check_prometheus(config)
    check_telemetry(config)
    check_command(config.notify)


class RunMonitoring(ExitStack):
    """Everything that watches a run, from before its first start until after its last.

    The usage loop::

        with RunMonitoring(config.logger, findings=findings, restarts=restarts) as monitoring:
            session = RunSession(..., observer=monitoring.observer)
            with session, monitoring.watching(runtime):
                ...

    Args:
        config: The `logger` section.
        findings: Further alarms, see `Notifications`.
        restarts: Returns True if the run is restored after an error.

    Raises:
        ConfigError: As `check_monitoring`, and if a port cannot be opened.
    """

    def __init__(self, config: LoggerConfig, *, findings: Findings, restarts: Callable[[], bool]) -> None:
        super().__init__()
        check_monitoring(config)
        self._system: SystemMonitor | None = None
        self._has_telemetry = config.otel_endpoint is not None
        self.observer = Observers()
        with ExitStack() as stack:
            if config.reads_workers:
                self._system = SystemMonitor(period_s=config.monitoring.period_s, records=config.monitoring_enabled)
                self.observer.observers.append(self._system)
            if config.prometheus_port is not None:
                assert self._system is not None, "an endpoint has readings"
                self._add(PrometheusEndpoint(config, self._system.readings), stack)
            if config.otel_endpoint is not None:
                try:
                    self._add(Telemetry.to(config.otel_endpoint), stack)
                except Exception as error:  # noqa: BLE001  # wrong variables OTEL_* must not cost the run anything
                    _log.warning("no spans are sent (%s: %s)", type(error).__name__, error)
            if config.notify.is_enabled:
                self._add(Notifications(config.notify, findings=findings, restarts=restarts), stack)
            self.enter_context(stack.pop_all())

    def _add(self, observer: PrometheusEndpoint | Telemetry | Notifications, stack: ExitStack) -> None:
        self.observer.observers.append(observer)

        def close() -> None:
            try:
                observer.close()
            except Exception as error:  # noqa: BLE001  # an observer must not cost the run anything
                _log.warning("%s could not be closed (%s: %s)", type(observer).__name__, type(error).__name__, error)

        stack.callback(close)

    @contextmanager
    def watching(self, runtime: MonitoredRuntime) -> Iterator[None]:
        """Read the workers of a run while they live."""
        if self._has_telemetry and runtime.rollout_pool is not None:
            runtime.rollout_pool.on_group = self.observer.end_group
        if self._system is None:
            yield
            return
        with self._system.watching(runtime.monitored):
            yield
