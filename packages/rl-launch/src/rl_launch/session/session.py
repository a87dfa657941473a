"""The run session: timing, records, progress and checkpoints of one run."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from rich.console import Console

from rl_core.callback import CallbackRun, EndStatus, RunEnd
from rl_core.config import WhenChanged, as_written, keys_when_changed
from rl_core.errors import CheckpointDamaged, RLError, RunDirectoryError, WorkerDied, WorkerError
from rl_core.metrics import Metric, results
from rl_core.model import Model
from rl_core.plugins import export_suffixes
from rl_core.rollouts.group import RolloutGroup
from rl_core.run import Checkpointable
from rl_launch.session.callbacks.callback_classes import MadeCallback
from rl_launch.session.callbacks.callbacks import Callbacks
from rl_launch.session.checkpoints.checkpoints import ADAPTER, Checkpoints, written_at
from rl_launch.session.config import CheckpointingConfig, LoggerConfig
from rl_launch.session.directory.branch import Branch
from rl_launch.session.directory.recording import Recording
from rl_launch.session.directory.run_directory import RunDirectory
from rl_launch.session.directory.run_state import FILE_NAME as STATE
from rl_launch.session.directory.run_state import BestSoFar, RunState, Status
from rl_launch.session.rollouts.records import MetricsFile, RolloutFiles, RolloutWriter
from rl_launch.session.stop import StopRequest
from rl_launch.session.tracking.log_output import logged_to, shared_console
from rl_launch.session.tracking.progress import Progress
from rl_launch.session.tracking.writers import MetricWriters, check_writers, open_writers

_logger = logging.getLogger(__name__)

# rates that follow from a count and the phase it was made in
_RATES = (
    ("generation/tokens_per_second", "generation/num_tokens", "generation"),
    ("train/tokens_per_second", "train/num_tokens", "training"),
)

_AHEAD = "idle/trainer"
"""Metric of steps whose rollouts are made ahead of them, so that generation goes on during the whole step."""


class SessionConfig(Protocol):
    """The sections of a root config that a session needs."""

    @property
    def checkpointing(self) -> CheckpointingConfig:
        """When to save, and which checkpoints to keep."""
        ...

    @property
    def logger(self) -> LoggerConfig:
        """The metric writers."""
        ...


class CheckpointReceiver(Protocol):
    """Takes the checkpoints of a run as they are saved; its own failures are reported and never raised."""

    def begin(self, run_dir: Path) -> None:
        """Called when the run directory is open."""
        ...

    def saved(self, step: int, checkpoint: Path) -> None:
        """Called with each complete checkpoint; returns at once. The checkpoint may be removed afterwards."""
        ...

    def end(self, *, is_finished: bool, at_once: bool) -> None:
        """Called when the run has ended; waits for what is under way unless it was told to end at once."""
        ...


class RunSession:
    """A `rl_core.run.Run` over a run directory.

    The usage loop::

        with RunSession(run_dir, config, title="grpo") as run:
            algorithm(config, components, run)

    Entering takes the directory, checks its contents and opens the writers; leaving without an error saves the last
    complete step if that has not been saved.

    Args:
        run_dir: made, or reopened if it holds a run of the same config.
        config: the resolved root, a `rl_core.config.Config` with `checkpointing` and `logger`.
        title: shown with the progress.
        fresh: refuse to resume an earlier run.
        since: start of the run's time limit, by `time.monotonic`; now if not given.
        console: shows the progress.
        recording: decides which part of the config the run directory keeps.
        branch: the start of a new run that is a branch of another.
        exports: as of `Checkpoints`; the policy's if not given.
        callbacks: User code that is called during the run.
        pusher: Pushes checkpoints; none are pushed without it.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Any,
        *,
        title: str = "",
        fresh: bool = False,
        since: float | None = None,
        console: Console | None = None,
        recording: Recording | None = None,
        branch: Branch | None = None,
        exports: Mapping[str, str] | None = None,
        callbacks: Sequence[MadeCallback] = (),
        pusher: CheckpointReceiver | None = None,
    ) -> None:
        self.directory = RunDirectory(run_dir, recording)
        self._branch = branch
        self._config = config
        self._fresh = fresh
        self._checkpointing: CheckpointingConfig = config.checkpointing
        exports = export_suffixes({}) if exports is None else exports
        self._checkpoints = Checkpoints(self.directory.checkpoints, self._checkpointing, exports=exports)
        self._callbacks = Callbacks(callbacks)
        self._pusher = pusher
        self._metrics = MetricsFile(self.directory.metrics)
        self._rollouts = RolloutFiles(self.directory.rollouts)
        self._progress = Progress(title or self.directory.path.name, console or shared_console())
        self._stop = StopRequest(self._checkpointing.must_save_by_s, since)
        self._found: tuple[int, Path] | None = None
        self._writers = MetricWriters()
        self._models: Mapping[str, Model] = {}
        self._state: Mapping[str, Checkpointable] = {}
        self._max_steps = 0
        self._done = self._saved = 0
        self._begun_at = self._begun_wall = self._blocked_s = 0.0
        self._has_begun = self._is_goal_met = False
        self._best = self._new_best()
        self._noted = RunState("running")
        self._step: int | None = None
        self._step_since = 0.0
        self._pending: dict[int, dict[str, float]] = {}
        self._times: dict[str, float] = {}
        self._open_phases: list[str] = []
        self._resources = ExitStack()
        self.last_metrics: Mapping[str, float] = {}
        self._is_unranked = False

    def __enter__(self) -> Self:
        check_writers(self._config.logger)
        access = self._config.logger.run_dir_access
        resumes = self.directory.open(self._config, fresh=self._fresh, branch=self._branch, access=access)
        with ExitStack() as stack:
            stack.callback(self.directory.close)
            self._branch = self.directory.branch
            if resumes and not self._checkpointing.enabled and self._metrics.read():
                raise RunDirectoryError(
                    f"{self.directory.path} holds a run that saved no checkpoints, so it cannot be resumed. "
                    "Choose another run_dir."
                )
            stack.enter_context(logged_to(self.directory.logs / "driver.log"))
            self._found = self._checkpoints.newest() or self._branch_point()
            after = self._found[0] if self._found else 0
            self._checkpoints.tidy(after)
            self._writers = MetricWriters(
                open_writers(
                    self._config.logger,
                    self.directory.path,
                    settings=self._config,
                    after=after,
                    labels=self.directory.labels,
                )
            )
            stack.callback(self._writers.close)
            self._stop.listen(gracefully=False)
            stack.callback(self._stop.unlisten)
            goals = keys_when_changed(self._config, WhenChanged.GOAL)
            self._noted = replace(RunState.read(self.directory.path) or self._noted, goals=goals)
            self._note("running")
            if self._pusher is not None:
                self._pusher.begin(self.directory.path)
            self._progress.start()
            stack.callback(self._progress.close)
            stack.callback(self._rollouts.close)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._resources:
            try:
                self._settle(error)
                if error is None and self._callbacks.failure is not None:
                    raise self._callbacks.failure
            except BaseException as failure:
                self._note_end(failure)
                raise
            self._note_end(error)
            if isinstance(error, SystemExit) and self._stop.unwound_by is not None:
                # a wait of Ray's that a signal interrupts replaces the code by 1
                error.code = 128 + self._stop.unwound_by
            if kind is None:
                adapter = self.directory.checkpoints / f"step_{self._saved}" / ADAPTER
                if adapter.is_dir():
                    _logger.info("adapters, for peft: %s", adapter)
                if self._stop.reason:
                    _logger.info("ended after step %d of %d: %s", self._done, self._max_steps, self._stop.reason)
            elif error is not None and self._max_steps:
                error.add_note(
                    f"in step {self._done + 1} of {self._max_steps}{f', {self.doing}' if self.doing else ''}"
                )

    @contextmanager
    def with_models(self) -> Iterator[None]:
        """Context that saves the last complete step when it is left, while the models still exist; a session that
        outlives its models needs it around the loop."""
        try:
            yield
        except BaseException as error:
            self._settle(error)
            raise
        self._settle(None)

    @property
    def stop_reason(self) -> str:
        """Why the run ended before its last step; empty if it did not."""
        return self._stop.reason

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The signal that ended the run before its last step, if one did."""
        return self._stop.signal

    @property
    def doing(self) -> str:
        """The innermost phase in progress; empty between phases."""
        return self._open_phases[-1] if self._open_phases else ""

    @property
    def completed(self) -> int:
        """The last complete step."""
        return self._done

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 before there is one."""
        return self._saved

    @property
    def has_begun(self) -> bool:
        """Whether everything was started and restored, so that steps could be made."""
        return self._has_begun

    def steps(
        self, max_steps: int, *, models: Mapping[str, Model], state: Mapping[str, Checkpointable]
    ) -> Iterator[int]:
        """Steps still to do: the call restores the newest complete checkpoint, and asking for the next step saves one
        if it is due. Models that do not train are neither saved nor restored.

        Raises:
            RunDirectoryError: if the checkpoint lacks one of the models or states.
        """
        self._models = {name: model for name, model in models.items() if model.trains}
        self._state, self._max_steps = dict(state), max_steps
        self._done = self._saved = self._restore()
        self._has_begun = True
        self._metrics.cut_back(self._done if self._done else -1)
        self._best = self._new_best()
        history = self._metrics.read()
        for row in history:
            self._best.add(row["step"], row)
        self._note("running")
        self._rollouts.cut_back(self._done if self._done else -1)
        # again, because starting Ray has replaced the first handler by its own
        self._stop.listen(gracefully=True)
        self._callbacks.start(
            CallbackRun(
                self.directory.path, as_written(self._config), self._done, self._max_steps, tuple(history), self.stop
            )
        )
        return self._iterate(self._done + 1)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `time/<name>`; a phase before the first step is logged and counts to no step."""
        started = time.monotonic()
        self._open_phases.append(name)
        self._progress.phase(name)
        try:
            yield
            self._open_phases.pop()
        finally:
            # after an error `doing` still says where it happened
            self._progress.phase(self.doing)
            seconds = time.monotonic() - started
            if self._step is None:
                _logger.info("%s: %.1f s", name.replace("_", " "), seconds)
            else:
                self._times[name] = self._times.get(name, 0.0) + seconds

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Metrics of a step, merged into its line; the line is written when the step is done."""
        self._pending.setdefault(step, {}).update(results(metrics))

    def record_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> None:
        """Have a step's rollouts written, one line each; those beyond the advantages have null. Writes none of steps
        that `logger.rollout_period` leaves out."""
        if not self.due(self._config.logger.rollout_period, step):
            return
        with self.phase("recording"):
            self._rollouts.append(step, groups, advantages)

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Have the rollouts of a validation written, one line each, unless `logger.rollout_period` is 0."""
        if self._config.logger.rollout_period:
            with self.phase("recording"):
                self._rollouts.append(step, groups, np.zeros(0), "val")

    def write_rollouts_by(self, writer: RolloutWriter) -> None:
        """Have rollouts written by another process that shares the run's folder; it must live as long as the models."""
        self._rollouts.write_elsewhere = writer

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """Whether something with this period is due after this step.

        A last step that a signal or a time limit decided does not count as the end: there is time for saving only.
        """
        return bool(period and step % period == 0) or (at_end and step == self._max_steps)

    def stop(self, reason: str) -> None:
        """End after the current step, having saved: the goal is met, and the run is finished."""
        self._is_goal_met = self._is_goal_met or not self._stop.reason
        self._stop.ask(reason)

    def _iterate(self, first: int) -> Iterator[int]:
        for step in range(first, self._max_steps + 1):
            if self._stop.reason:
                break
            self._begin(step)
            yield step
            self._complete(step)
        self._finish()

    def _begin(self, step: int) -> None:
        self._step, self._step_since = step, time.monotonic()
        self._times = {}
        self._progress.begin(step, self._max_steps)

    def _complete(self, step: int) -> None:
        seconds = time.monotonic() - self._step_since
        self._pending.setdefault(step, {}).update(self._timings(seconds))
        for earlier in sorted(number for number in self._pending if number <= step):
            self._write(earlier, self._pending.pop(earlier))
        self._progress.finish(step, self.last_metrics, seconds)
        self._done, self._step = step, None
        self._finish_save(wait=False)
        self._stop.after_step(seconds, saves=self._checkpoints.begun is not None)
        if self._checkpointing.enabled and self.due(self._checkpointing.save_period, step):
            self._save(wait=not self._checkpointing.async_save)

    def _timings(self, seconds: float) -> dict[str, float]:
        timings = {f"time/{name}": value for name, value in self._times.items()} | {"time/step": seconds}
        recorded = self._pending.get(self._step or 0, {})
        for rate, count, phase in _RATES:
            took = seconds if phase == "generation" and _AHEAD in recorded else self._times.get(phase)
            if count in recorded and took:
                timings[rate] = recorded[count] / took
        return timings

    def _note_unranked(self, metrics: Mapping[str, float]) -> None:
        """Warn once if a validation has not recorded the metric that ranks checkpoints."""
        key = self._checkpointing.metric_key
        validated = [name for name in metrics if name.startswith("val/")]
        if self._is_unranked or key is None or not key.startswith("val/") or not validated or key in metrics:
            return
        self._is_unranked = True
        _logger.warning(
            "checkpointing.metric_name: validation does not record %s, so the newest checkpoints are kept; it has %s",
            key,
            ", ".join(validated),
        )

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        odd = sorted(name for name, value in metrics.items() if not np.isfinite(value))
        if odd:
            _logger.warning("step %d: not a finite number: %s", step, ", ".join(odd))
        self._note_unranked(metrics)
        metrics = self._callbacks.with_step(step, metrics)
        self._metrics.append(step, metrics)
        self._writers.write(step, metrics)
        self._best.add(step, metrics)
        self.last_metrics = metrics

    def _finish(self) -> None:
        """Save the last complete step if that has not been saved."""
        self._rollouts.flush()
        self._finish_save(wait=True)
        if self._checkpointing.enabled and self._done > self._saved:
            self._save(wait=True)
        self._stop.listen(gracefully=False)

    def _settle(self, error: BaseException | None) -> None:
        """After an error, complete a save that is under way if possible; after a failure of a worker, or a request to
        end at once, it is abandoned."""
        if error is None:
            self._finish()
            return
        try:
            self._rollouts.flush()
        except (RLError, OSError) as failure:
            _logger.warning("not all rollouts were written: %s", failure)
        step = self._checkpoints.begun
        if isinstance(error, Exception) and not isinstance(error, (WorkerDied, WorkerError)):
            try:
                self._finish_save(wait=True)
            except Exception as failure:  # noqa: BLE001  # the first error is the one to raise
                _logger.warning("the checkpoint of step %d was not completed: %s", step, failure)
        self._checkpoints.abandon()

    def _save(self, *, wait: bool) -> None:
        """Begin a save of the last complete step, and complete it or leave it under way."""
        self._rollouts.flush()
        self._metrics.sync()
        self._finish_save(wait=True)
        self._begun_at, self._begun_wall = time.monotonic(), time.time()
        self._progress.phase("saving")
        self._checkpoints.begin(
            self._done, models=self._models, state=self._state, metrics=self.last_metrics, wait=wait
        )
        self._blocked_s = time.monotonic() - self._begun_at
        self._progress.phase("")
        if wait:
            self._finish_save(wait=True)

    def _finish_save(self, *, wait: bool) -> None:
        """Complete the save under way, if it is written."""
        step = self._checkpoints.begun
        if step is None:
            return
        asked = time.monotonic()
        self._progress.phase("saving")
        path = self._checkpoints.finish(wait=wait)
        self._progress.phase("")
        ended = time.monotonic()
        so_far = ended - self._begun_at
        if path is None:
            self._stop.after_save(so_far)
            return
        self._saved = step
        self._blocked_s += ended - asked
        # the rest of a step after the last file was written does not count to the save
        alone = written_at(path) - self._begun_wall + ended - asked
        self._stop.after_save(min(so_far, max(self._blocked_s, alone)))
        self._note("running")
        # a save beside the steps holds them up for only a part of its time
        held = f", {self._blocked_s:.1f} s of it between steps" if self._blocked_s < so_far - 0.1 else ""
        _logger.info("saved checkpoint %s in %.1f s%s", path.name, so_far, held)
        if self._pusher is not None:
            self._pusher.saved(step, path)
        self._callbacks.saved(step, path)

    def _new_best(self) -> BestSoFar:
        return BestSoFar(self._checkpointing.metric_key, higher_is_better=self._checkpointing.higher_is_better)

    def _note_end(self, error: BaseException | None) -> None:
        """Write into the run directory how the run ended, tell callbacks, and end pushes."""
        status: EndStatus
        if isinstance(error, Exception):
            status, reason = "failed", (str(error) or type(error).__name__).partition("\n")[0]
        elif error is not None:
            status, reason = "interrupted", self._why_unwound(error)
        elif self._is_goal_met or (self._max_steps and self._done >= self._max_steps):
            status, reason = "finished", self._stop.reason if self._is_goal_met else ""
        else:
            status, reason = "interrupted", self._stop.reason
        self._note(status, reason)
        self._callbacks.end(RunEnd(status, reason, self._done, self._max_steps, self.last_metrics))
        if self._pusher is not None:
            at_once = error is not None and not isinstance(error, Exception)
            self._pusher.end(is_finished=status == "finished", at_once=at_once)

    def _why_unwound(self, error: BaseException) -> str:
        """Why the run ended without finishing its step."""
        unwound_by = self._stop.unwound_by
        if unwound_by is None:
            return self._stop.reason or type(error).__name__
        if self._stop.signal is not None:
            return f"{self._stop.reason}, then {unwound_by.name} ended it at once"
        return f"{unwound_by.name} {'as it ended' if self._has_begun else 'while it started'}"

    def _note(self, status: Status, reason: str = "") -> None:
        self._noted = replace(
            self._noted,
            status=status,
            reason=reason,
            step=self._done if self._has_begun or self._found is None else self._found[0],
            max_steps=self._max_steps or self._noted.max_steps,
            best=self._best.best if self._has_begun else self._noted.best,
        )
        try:
            self._noted.write(self.directory.path)
        except OSError as error:
            _logger.warning("%s was not written: %s", self.directory.path / STATE, error)

    def _restore(self) -> int:
        if self._found is None:
            return 0
        step, path = self._found
        with self.phase("restoring"):
            if self._branch is not None and path == self._branch.checkpoint:
                self._restore_branch(self._branch)
                return step
            while True:
                try:
                    self._checkpoints.restore(path, models=self._models, state=self._state)
                    break
                except CheckpointDamaged as error:
                    step, path = self._checkpoints.before(step, str(error))
                    self._checkpoints.tidy(step)
        _logger.info("going on after step %d", step)
        return step

    def _branch_point(self) -> tuple[int, Path] | None:
        """Step and checkpoint of another run that this one starts from."""
        if self._branch is None:
            return None
        self._branch.require()
        return self._branch.step, self._branch.checkpoint

    def _restore_branch(self, branch: Branch) -> None:
        try:
            state = self._state if branch.keeps_position else {}
            self._checkpoints.restore(branch.checkpoint, models=self._models, state=state)
        except CheckpointDamaged as error:
            raise RunDirectoryError(f"cannot branch: {error}. Branch from another step.") from None
        data = "" if branch.keeps_position else "; its data or seed differs, so it starts at the beginning of the data"
        _logger.info("branching from %s at step %d%s", branch.run_dir, branch.step, data)
