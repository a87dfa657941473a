"""Observers of a run: they see its steps and its end, and can never hold it up or end it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.rollouts.group import RolloutGroup
from rl_core.run import RunEnd

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObservedRun:
    """A run that begins or resumes.

    Args:
        name: Its name in trackers.
        run_dir: Run directory.
        config: Resolved config as nested plain values.
        step: Last complete step; 0 in a new run.
    """

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    step: int


class RunObserver:
    """Sees a run as it proceeds. Override what you need. Methods return at once, unless they begin or end a profile."""

    def begin(self, run: ObservedRun) -> None:
        """Note that the run directory is open, before the workers start."""

    def start(self, max_steps: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Note that the first step follows, with the metrics of earlier steps."""

    def begin_step(self, step: int) -> None:
        """Note that a step follows; the time of this call does not count to the step."""

    def begin_phase(self, name: str) -> None:
        """Note that a phase of the run begins; phases nest."""

    def end_phase(self, name: str) -> None:
        """Note that the innermost phase ends, also with an error."""

    def end_group(self, group: RolloutGroup, submitted_ns: int, replica: int) -> None:
        """Note that the rollouts of a prompt have ended.

        Args:
            group: The rollouts.
            submitted_ns: When they were handed to the rollout workers, in nanoseconds since the epoch.
            replica: Number of the replica that generated.
        """

    def step_metrics(self) -> Mapping[str, float]:
        """Return metrics to record with the step that is about to be complete."""
        return {}

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that a step is complete and its metrics are written, before a checkpoint of it is saved."""

    def saved(self, step: int) -> None:
        """Note that a checkpoint is complete."""

    def end(self, state: RunEnd) -> None:
        """Note that the run has ended."""


class Observers(RunObserver):
    """Several observers as one. One that raises is reported in the log and turned off."""

    def __init__(self, observers: Iterable[RunObserver] = ()) -> None:
        self.observers = list(observers)

    def step_metrics(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        self._tell(lambda each: found.update(each.step_metrics()))
        return found

    def _tell(self, call: Callable[[RunObserver], None]) -> None:
        for observer in tuple(self.observers):
            try:
                call(observer)
            except Exception as error:  # noqa: BLE001  # an observer must not cost the run anything
                self.observers.remove(observer)
                _log.warning("%s is turned off (%s: %s)", type(observer).__name__, type(error).__name__, error)


def _passed_on(name: str) -> Callable[..., None]:
    def method(self: Observers, *arguments: Any) -> None:
        self._tell(lambda each: getattr(each, name)(*arguments))

    return method


for _name in ("begin", "start", "begin_step", "begin_phase", "end_phase", "end_group", "end_step", "saved", "end"):
    setattr(Observers, _name, _passed_on(_name))
