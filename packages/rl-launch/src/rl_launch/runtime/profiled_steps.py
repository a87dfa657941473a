"""Profiles of workers over some steps of a run (`profiling`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rl_core.errors import Origin, RLError
from rl_core.ray.calls import fetch
from rl_core.tracing.profiling import ProfileOrder, ProfileReport, Tool
from rl_launch.session.config import ProfilingConfig
from rl_launch.session.observer import RunObserver

_log = logging.getLogger(__name__)

FOLDER = "profiles"

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 900.0
"""Maximum wait in seconds for the files, which may have gigabytes."""


@dataclass(frozen=True)
class Profiled:
    """A worker that can be profiled.

    Args:
        name: Its name, the same as of its log.
        number: Rank of its model, or number of the generator.
        call: Calls a method of it.
    """

    name: str
    number: int
    call: Callable[..., ray.ObjectRef]


def folder_of(run_dir: Path, first: int, last: int) -> Path:
    """Return the folder of the profiles of a range of steps."""
    return run_dir / FOLDER / f"step_{first}-{last}"


class ProfiledSteps(RunObserver):
    """Starts the profiles before the first of the steps that the run makes, and stops them after the last.

    Args:
        config: The section; it has steps.
        run_dir: Folder of the run.
        workers: Returns the workers as they are now.
        py_spy: Path of the program, if it is one of the tools.
    """

    def __init__(
        self, config: ProfilingConfig, run_dir: Path, workers: Callable[[], Sequence[Profiled]], *, py_spy: str
    ) -> None:
        assert config.steps is not None, "made if there are steps"
        self._first, self._last = config.steps
        self._ranks = set(config.ranks)
        self._tools: tuple[Tool, ...] = tuple(dict.fromkeys(config.tools))
        self._run_dir = run_dir
        self._workers = workers
        self._py_spy = py_spy
        self._running: list[Profiled] = []
        self._folder = run_dir
        self._begun = 0

    def start(self, max_steps: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Warn if the run ends before the first of the steps."""
        if self._first > max_steps:
            text = "profiling.steps begins with step %d, but the run ends with step %d: nothing is profiled"
            _log.warning(text, self._first, max_steps)

    def begin_step(self, step: int) -> None:
        """Start the profiles, if this is the first of the steps that the run makes."""
        if self._running or not self._first <= step <= self._last:
            return
        self._begun = step
        self._folder = folder_of(self._run_dir, step, self._last)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._running = [worker for worker in self._workers() if worker.number in self._ranks]
        names = ", ".join(worker.name for worker in self._running)
        _log.info("profiling steps %d to %d with %s: %s", step, self._last, ", ".join(self._tools), names)
        orders = [ProfileOrder(str(self._folder), each.name, self._tools, self._py_spy) for each in self._running]
        self._answers("start_profile", START_TIMEOUT_S, [(order,) for order in orders])

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop the profiles, if this is the last of the steps."""
        if self._running and step >= self._last:
            self._stop(step)

    def close(self) -> None:
        """Stop profiles that are still recording, because the run ends before the last of the steps."""
        if self._running:
            self._stop(self._last)

    def _stop(self, step: int) -> None:
        files = self._answers("stop_profile", STOP_TIMEOUT_S, [()] * len(self._running))
        self._running = []
        if files:
            _log.info("profiles of steps %d to %d: %s", self._begun, step, ", ".join(map(_described, files)))
        if "nsys" in self._tools:
            # nsys writes them when it has processed what it recorded
            _log.info("reports of nsys: %s", folder_of(self._run_dir, self._first, self._last) / "*.nsys-rep")

    def _answers(self, method: str, timeout_s: float, arguments: Sequence[tuple[Any, ...]]) -> list[str]:
        """Call all workers, log what failed, and return the files."""
        calls = [each.call(method, *given) for each, given in zip(self._running, arguments, strict=True)]
        files: list[str] = []
        for worker, ref in zip(self._running, calls, strict=True):
            try:
                report: ProfileReport = fetch(ref, Origin(worker.name, 0, "its node", method), timeout_s)
            except RLError as error:
                _log.warning("no profile of %s: %s", worker.name, error)
                continue
            files += report.files
            for problem in report.problems:
                _log.warning("no profile of %s", problem)
        return files


def _described(path: str) -> str:
    try:
        size = Path(path).stat().st_size
    except OSError:
        return path
    return f"{path} ({size / 2**20:.1f} MiB)"
