"""Readings of machines, workers and replicas as metrics of a run's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_launch.monitoring.readings import Readings
from rl_launch.session.observer import RunObserver

if TYPE_CHECKING:
    from rl_launch.monitoring.poller import Monitored, Poller

ASK_TIMEOUT_S = 0.25
"""Maximum time that a step waits for readings, if it was too short to have any."""


class SystemMonitor(RunObserver):
    """Reads the workers of a run in the background, and gives each step what was read during it.

    Args:
        period_s: Seconds between two readings.
        records: True if readings become metrics of the steps; otherwise only `readings` has them.

    Attributes:
        readings: What was read.
    """

    def __init__(self, *, period_s: float, records: bool) -> None:
        self.readings = Readings()
        self._period_s = period_s
        self._records = records
        self._poller: Poller | None = None

    @contextmanager
    def watching(self, workers: Callable[[], Sequence[Monitored]]) -> Iterator[None]:
        """Context in which workers are read; it ends before they do.

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
        """Mean and maximum of the readings of the step."""
        if not self._records:
            self.readings.take()
            return {}
        if self._poller is not None and not self.readings.has_any:
            self._poller.ask_now(ASK_TIMEOUT_S)
        return self.readings.take()
