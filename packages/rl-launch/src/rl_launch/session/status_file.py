"""The status of a run in its directory, for those who look at it from outside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_launch.session.directory.run_state import FILE_NAME, Best, RunState, Status

_logger = logging.getLogger(__name__)


class StatusFile:
    """Keeps `state.json` of a run directory up to date. A file that cannot be written is reported and costs nothing.

    Args:
        folder: The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = RunState("running", saved=0)

    def open(self, *, goals: Mapping[str, Any], step: int) -> None:
        """Continue from the file of an earlier session, if there is one.

        Args:
            goals: Keys that decide when the run is finished, with their values.
            step: The step after which the run continues; 0 for a new run.
        """
        self._state = replace(RunState.read(self._folder) or self._state, goals=goals, step=step)

    def expect(self, max_steps: int) -> None:
        """Set the number of steps of the run."""
        self._state = replace(self._state, max_steps=max_steps)

    def advance(self, step: int, best: Best | None, saved: int) -> None:
        """Set the last complete step, the best value of a metric, and the step of the newest checkpoint."""
        self._state = replace(self._state, step=step, best=best, saved=saved)

    def write(self, status: Status, reason: str = "") -> None:
        """Write the file.

        Args:
            status: The status.
            reason: Why the run has ended; empty if all steps are made.
        """
        self._state = replace(self._state, status=status, reason=reason)
        try:
            self._state.write(self._folder)
        except OSError as error:
            _logger.warning("%s was not written: %s", self._folder / FILE_NAME, error)
