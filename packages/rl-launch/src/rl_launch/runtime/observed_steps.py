"""The observers of a run's steps: its traces, from the spans of all processes, and its profiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from rl_core.errors import FailureOrigin, RLError
from rl_core.ray.calls import fetch, wait
from rl_core.tracing.profiling import ProfileOrder, ProfileReport, Tool
from rl_core.tracing.spans import SpanReport, machine_clock
from rl_launch.run_config.inputs import py_spy_program
from rl_launch.run_session.config import ProfilingConfig
from rl_launch.run_session.observer import RunObserver
from rl_launch.run_session.session import RunSession
from rl_launch.run_session.traces.step_trace import Collected, StepTrace
from rl_launch.run_session.traces.trace_folder import FOLDER

_log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout in seconds of all answers. A process that answers later keeps its spans until the next question."""

_STALE_S = 600.0
"""Age in seconds of an estimate of a clock that a worse one replaces, because clocks drift."""

PROFILES = "profiles"

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 900.0
"""Timeout in seconds of the files, which may have gigabytes."""


def observe_steps(
    session: RunSession,
    config: ProfilingConfig,
    processes: Callable[[], Mapping[str, ActorHandle]],
    profiled: Callable[[], Sequence[Profiled]],
    stack: ExitStack,
) -> None:
    """Trace and profile a run by the section `profiling`.

    Args:
        session: Session of the run.
        config: The section.
        processes: Returns the run's processes as they are now, by the names of their logs.
        profiled: Returns the workers that can be profiled.
        stack: Ends the observation before the processes end.
    """
    run_dir = session.directory.path
    if config.traces:
        trace = StepTrace(run_dir / FOLDER, ProcessSpans(processes).collect)
        session.observe(trace)
        stack.callback(trace.close)
    if config.steps is not None:
        profiles = ProfiledSteps(config, run_dir, profiled, py_spy=py_spy_program() or "py-spy")
        session.observe(profiles)
        stack.callback(profiles.close)


class ProcessSpans:
    """Collects the spans of all processes of a run; used by one thread.

    The offset of another machine's clock is half of the time between question and answer at most, so the quickest
    answer of a machine gives the estimate. Processes of this machine share the driver's clock.

    Args:
        actors: Returns the processes as they are now, by name.
        timeout_s: See `TIMEOUT_S`.
    """

    def __init__(self, actors: Callable[[], Mapping[str, ActorHandle]], *, timeout_s: float = TIMEOUT_S) -> None:
        self._actors = actors
        self._timeout_s = timeout_s
        self._clocks = Clocks(machine_clock())

    def collect(self) -> list[Collected]:
        """Ask all processes, and return the answers that come in time."""
        asked: dict[Any, tuple[str, int]] = {}
        for name, actor in self._actors().items():
            asked[actor.take_spans.remote()] = (name, time.monotonic_ns())
        end = time.monotonic() + self._timeout_s
        found: list[Collected] = []
        while asked and (left := end - time.monotonic()) > 0:
            for ref in wait(list(asked), left):
                name, sent = asked.pop(ref)
                try:
                    report: SpanReport = fetch(ref, FailureOrigin(name, 0, "its node", "spans"), 0)
                except RLError as error:
                    # The code that needs the process reports its end.
                    _log.debug("no spans of %s: %s", name, error)
                    continue
                self._clocks.note(report.clock, report.now, sent, time.monotonic_ns())
                found.append(Collected(name, report))
        return [Collected(each.process, each.report, self._clocks.offset(each.report.clock)) for each in found]


class Clocks:
    """Offsets between the clocks of machines and the driver's.

    Args:
        own: Identifier of the driver's clock.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._estimates: dict[str, tuple[int, int, int]] = {}

    def note(self, clock: str, now: int, sent: int, received: int) -> None:
        """Take an answer into account.

        Args:
            clock: Clock of the process that answered.
            now: Its time when it answered, in nanoseconds.
            sent: Driver's time of the question.
            received: Driver's time of the answer.
        """
        error, offset = received - sent, (sent + received) // 2 - now
        known = self._estimates.get(clock)
        if known is None or error <= known[0] or received - known[2] > _STALE_S * 1e9:
            self._estimates[clock] = error, offset, received

    def offset(self, clock: str) -> int:
        """Return the nanoseconds to add to a time of a clock for the driver's; 0 for its own clock."""
        return 0 if clock == self._own else self._estimates[clock][1]


class Profiled(NamedTuple):
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
    return run_dir / PROFILES / f"step_{first}-{last}"


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
        assert config.steps is not None, "profiles need steps"
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

        def described(path: str) -> str:
            try:
                return f"{path} ({Path(path).stat().st_size / 2**20:.1f} MiB)"
            except OSError:
                return path

        if files:
            _log.info("profiles of steps %d to %d: %s", self._begun, step, ", ".join(map(described, files)))
        if "nsys" in self._tools:
            # nsys writes them when it has processed its recording.
            _log.info("reports of nsys: %s", folder_of(self._run_dir, self._first, self._last) / "*.nsys-rep")

    def _answers(self, method: str, timeout_s: float, arguments: Sequence[tuple[Any, ...]]) -> list[str]:
        """Call all workers, log failures, and return the files."""
        calls = [each.call(method, *given) for each, given in zip(self._running, arguments, strict=True)]
        files: list[str] = []
        for worker, ref in zip(self._running, calls, strict=True):
            try:
                report: ProfileReport = fetch(ref, FailureOrigin(worker.name, 0, "its node", method), timeout_s)
            except RLError as error:
                _log.warning("no profile of %s: %s", worker.name, error)
                continue
            files += report.files
            for problem in report.problems:
                _log.warning("no profile of %s", problem)
        return files
