"""The time of steps and of the phases in them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rl_core.tracing import spans
from rl_launch.run_session.observer import RunObserver
from rl_launch.run_session.tracking.progress import RunProgress

_logger = logging.getLogger(__name__)

# rates that follow from a count and the phase it was made in
_RATES = (
    ("generation/tokens_per_second", "generation/num_tokens", "generation"),
    ("train/tokens_per_second", "train/num_tokens", "training"),
)

_AHEAD = "idle/trainer"
"""Metric of steps whose rollouts are made ahead of them, so that generation continues during the whole step."""


class StepClock:
    """Measures steps and phases, and shows them as they pass.

    The usage loop::

        clock.begin(step, max_steps)
        with clock.phase("training"):
            ...
        seconds = clock.seconds
        metrics = recorded | clock.timings(recorded, seconds)
        clock.end(metrics, seconds)

    Args:
        progress: Shows steps and phases.
        observer: Sees the beginning and the end of phases.
    """

    def __init__(self, progress: RunProgress, observer: RunObserver | None = None) -> None:
        self._progress = progress
        self._observer = observer or RunObserver()
        self._step: int | None = None
        self._since = 0.0
        self._seconds_by_phase: dict[str, float] = {}
        self._open_phases: list[str] = []
        self._seconds_within: list[float] = []

    @property
    def doing(self) -> str:
        """The innermost phase in progress; empty between phases."""
        return self._open_phases[-1] if self._open_phases else ""

    @property
    def seconds(self) -> float:
        """Seconds since the step in progress began."""
        return time.monotonic() - self._since

    def begin(self, step: int, max_steps: int) -> None:
        """Start to measure a step."""
        self._step, self._since = step, time.monotonic()
        self._seconds_by_phase = {}
        self._progress.begin(step, max_steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, without the phases within it; a phase outside a step is logged and counts to no step."""
        started = time.monotonic()
        self._open_phases.append(name)
        self._seconds_within.append(0.0)
        self._progress.phase(name)
        self._observer.begin_phase(name)
        try:
            yield
            self._open_phases.pop()
        finally:
            self._observer.end_phase(name)
            # After an error `doing` still shows where it happened.
            self._progress.phase(self.doing)
            ended = time.monotonic()
            spans.record("phases", name, round(started * 1e9), round(ended * 1e9))
            seconds = ended - started - self._seconds_within.pop()
            if self._seconds_within:
                self._seconds_within[-1] += ended - started
            if self._step is None:
                _logger.info("%s: %.1f s", name.replace("_", " "), seconds)
            else:
                self._seconds_by_phase[name] = self._seconds_by_phase.get(name, 0.0) + seconds

    @contextmanager
    def showing(self, name: str) -> Iterator[None]:
        """Show the block as a phase without measuring it; after an error it is still shown."""
        self._progress.phase(name)
        yield
        self._progress.phase("")

    def timings(self, recorded: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the metrics of time of the step in progress.

        Args:
            recorded: Metrics of the step, whose counts of tokens become rates.
            seconds: Duration of the step.
        """
        timings = {f"time/{name}": value for name, value in self._seconds_by_phase.items()} | {"time/step": seconds}
        for rate, count, phase in _RATES:
            took = seconds if phase == "generation" and _AHEAD in recorded else self._seconds_by_phase.get(phase)
            if count in recorded and took:
                timings[rate] = recorded[count] / took
        return timings

    def end(self, metrics: Mapping[str, float], seconds: float) -> None:
        """End the step in progress, and show its metrics."""
        assert self._step is not None, "no step is in progress"
        self._progress.finish(self._step, metrics, seconds)
        self._step = None
