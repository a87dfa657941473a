"""The run session, which orders the use of a run's directory, steps, records and checkpoints."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from rich.console import Console

from rl_core.config import WhenChanged, as_written, keys_when_changed
from rl_core.data.batch import Batch
from rl_core.errors import RLError, RunDirectoryError, WorkerDied, WorkerError
from rl_core.model import Saved
from rl_core.plugins import export_suffixes
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.judging import JudgeBudgetSpent
from rl_core.run import CallbackRun, Checkpointable, EndStatus, RunEnd
from rl_core.tracing.stacks import FOLDER as STACKS_FOLDER
from rl_core.tracing.stacks import stop_writing_stacks, write_stacks_of
from rl_launch.placement.bundles import DevicesLost
from rl_launch.run_session.callbacks import Callbacks, MadeCallback
from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, Checkpoints
from rl_launch.run_session.config import CheckpointingConfig
from rl_launch.run_session.directory.branch import Branch
from rl_launch.run_session.directory.recording import Recording
from rl_launch.run_session.directory.run_directory import RunDirectory
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import RunState, Status
from rl_launch.run_session.directory.writable import careful_umask
from rl_launch.run_session.guardrails import GuardrailEvent, GuardrailRestart, Guardrails, GuardrailStop
from rl_launch.run_session.observer import ObservedRun, Observers, RunObserver
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.run_session.rollouts.run_files import RolloutFiles, RolloutWriter, TokenFiles
from rl_launch.run_session.save_protocol import SaveProtocol
from rl_launch.run_session.step_clock import StepClock
from rl_launch.run_session.step_metrics import StepMetrics
from rl_launch.run_session.stop import StepAbandoned, StopRequest
from rl_launch.run_session.tracking.log_output import logged_to, shared_console
from rl_launch.run_session.tracking.progress import RunProgress
from rl_launch.run_session.tracking.writers import check_writers, open_writers

_logger = logging.getLogger(__name__)


class CheckpointReceiver(Protocol):
    """Takes the checkpoints of a run as they are saved; its own failures are reported and never raised."""

    def begin(self, run_dir: Path) -> None:
        """Take the run directory, which is open."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """Take a complete checkpoint; return at once. The checkpoint may be removed afterwards."""

    def end(self, *, is_finished: bool, at_once: bool) -> None:
        """End with the run; wait for pushes in progress unless the run ends at once."""


class RunSession:
    """A `rl_core.run.Run` over a run directory.

    The usage loop::

        with RunSession(run_dir, config, title="grpo") as run:
            algorithm(config, components, run)

    Entering takes the directory, checks its contents and opens the writers; leaving without an error saves the last
    complete step if that has not been saved.

    Args:
        run_dir: Made, or reopened if it holds a run of the same config.
        config: The resolved root, a `rl_core.config.Config` with `checkpointing` and `logger`.
        title: Shown with the progress.
        fresh: Refuse to resume an earlier run.
        since: Start of the run's time limit, by `time.monotonic`; now if not given.
        console: Shows the progress.
        recording: Decides which part of the config the run directory keeps.
        branch: The start of a new run that is a branch of another.
        exports: As of `Checkpoints`; the policy's if not given.
        callbacks: User code that is called during the run.
        pusher: Pushes checkpoints; none are pushed without it.
        observer: Sees the run's steps and its end.
        restarts: Returns True if the run is restored after an error, which trackers then see as an interruption.
        guardrails: Rules over the metrics; none if not given.
        last_step: Step after which the run ends, before its own last step; None for its own.

    Attributes:
        directory: The run directory.
        stop_request: Request to end the run before its last step.
        completed: The last complete step.
        has_begun: True if everything was started and restored, so that steps could be made.
        phase: Times a block as `time/<name>`; a phase before the first step is logged and counts to no step.
        record: Merges metrics into the line of a step, which is written when the step is done.
        read_token_texts_from: Has the texts of tokens written along with their values.
        observe: Adds an observer, which sees the steps that follow.
        interrupt: Ends the run after the current step, having saved: the same command resumes it.
        is_ending: See `StopRequest.is_ending`.
        saves_next: True if a checkpoint is saved when the step in progress ends.
        has_moved_on: True if the models are no longer as after the last complete step, which then cannot be saved.
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
        observer: RunObserver | None = None,
        restarts: Callable[[], bool] = lambda: False,
        guardrails: Guardrails | None = None,
        last_step: int | None = None,
    ) -> None:
        self.directory = RunDirectory(run_dir, recording)
        self._config = config
        access = config.logger.run_dir_access
        self._take_directory = partial(self.directory.open, config, fresh=fresh, branch=branch, access=access)
        self._guardrails, self._last_step = guardrails, last_step
        self._restarts = restarts
        self._callbacks = Callbacks(callbacks, lambda: self.stop_request.unwound_by)
        self._pusher = pusher
        self._observer = Observers([] if observer is None else [observer])
        self._saving: CheckpointingConfig = config.checkpointing
        self._progress = RunProgress(title or self.directory.path.name, console or shared_console())
        self._clock = StepClock(self._progress, self._observer)
        self.stop_request = StopRequest(config.checkpointing.must_save_by_s, since)
        exports = export_suffixes({}) if exports is None else exports
        checkpoints = Checkpoints(self.directory.checkpoints, self._saving, exports=exports)
        self._saves = SaveProtocol(checkpoints, self._clock, self.stop_request)
        self._state = RunState("running", saved=0)
        self._metrics = StepMetrics(self.directory.metrics, config.checkpointing, with_step=self._callbacks.with_step)
        logger, folder = config.logger, self.directory.rollouts
        self._tokens = TokenFiles(folder, logger.token_level, logger.token_level_groups)
        self._rollouts = RolloutFiles(folder, self._tokens)
        self._resources = ExitStack()
        self._max_steps = self.completed = self._exported = 0
        self.has_begun = self._is_goal_met = self.saves_next = self.has_moved_on = False
        self.phase, self.record = self._clock.phase, self._metrics.record
        self.read_token_texts_from = self._tokens.read_texts_from
        self.observe = self._observer.observers.append
        self.interrupt, self.is_ending = self.stop_request.ask, self.stop_request.is_ending

    def __enter__(self) -> Self:
        config = self._config
        check_writers(config.logger)
        with ExitStack() as stack:
            stack.enter_context(careful_umask())
            resumes = self._take_directory()
            stack.callback(self.directory.close)
            if resumes and not config.checkpointing.enabled and self._metrics.file.read():
                raise RunDirectoryError(
                    f"{self.directory.path} contains a run without checkpoints, so it cannot be resumed. "
                    "Choose another run_dir."
                )
            stack.enter_context(logged_to(self.directory.logs / "driver.log"))
            stack.enter_context(self._writing_stacks())
            after = self._saves.find(self.directory.branch)
            # Log that steps are made again although nothing is wrong with the checkpoint that the run continues from.
            run = RunFolder(self.directory.path)
            saved, made = run.state().saved or 0, int(run.last_metrics().get("step", 0))
            if saved > after and saved not in run.checkpoint_steps():
                _logger.warning(
                    "the checkpoint of step %d is gone; steps %d to %d are made again", saved, after + 1, made
                )
            elif made and not after:
                _logger.warning("no checkpoint was saved yet, so steps 1 to %d are made again", made)
            folder, labels = self.directory.path, self.directory.labels
            self._metrics.writers = open_writers(config.logger, folder, settings=config, after=after, labels=labels)
            stack.callback(self._metrics.writers.close, "failed")
            self.stop_request.listen(gracefully=False)
            stack.callback(self.stop_request.unlisten)
            goals = keys_when_changed(config, WhenChanged.GOAL)
            self._state = replace(RunState.read(folder) or self._state, goals=goals, step=after)
            self._note("running")
            if self._pusher is not None:
                self._pusher.begin(folder)
            self._observer.begin(ObservedRun(labels.name or folder.name, folder, as_written(config), after))
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
            stop = self.stop_request
            if isinstance(error, SystemExit) and stop.unwound_by is not None:
                # a wait of Ray's that a signal interrupts replaces the code by 1
                error.code = 128 + stop.unwound_by
            if kind is None:
                adapter = self.directory.checkpoints / f"step_{self.saved}" / ADAPTER
                if adapter.is_dir():
                    _logger.info("adapters, for peft: %s", adapter)
                if stop.reason:
                    _logger.info("ended after step %d of %d: %s", self.completed, self._max_steps, stop.reason)
            elif error is not None and self._max_steps:
                doing = f", {self._clock.doing}" if self._clock.doing else ""
                error.add_note(f"in step {self.completed + 1} of {self._max_steps}{doing}")

    @contextmanager
    def with_models(self) -> Iterator[None]:
        """Context that saves the last complete step when it is left, while the models still exist; a session that
        outlives its models needs it around the loop."""
        try:
            yield
        except StepAbandoned as abandoned:
            _logger.warning("step %d is abandoned, because it waits for %s", self.completed + 1, abandoned)
        except JudgeBudgetSpent:
            self._settle(None)
            raise
        except BaseException as error:
            self._settle(error)
            raise
        self._settle(None)

    @property
    def is_finished(self) -> bool:
        """True if all steps are made, or the goal is met."""
        return self._is_goal_met or bool(self._max_steps and self.completed >= self._max_steps)

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 before there is one."""
        return self._saves.saved

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Metrics of the last complete step; empty before there is one."""
        return self._metrics.last

    def steps(
        self, max_steps: int, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]
    ) -> Iterator[int]:
        """Yield the steps still to do: the call restores the newest complete checkpoint, and asking for the next step
        saves one if it is due. Models that do not train are neither saved nor restored.

        Raises:
            RunDirectoryError: If the checkpoint lacks one of the models or states.
        """
        self._max_steps = max_steps
        self._state = replace(self._state, max_steps=max_steps)
        self.completed = self._saves.restore(
            {name: model for name, model in models.items() if model.trains}, dict(state)
        )
        self.has_begun = True
        history = self._metrics.resume_after(self.completed)
        self._note("running")
        rollout_store.cut_back(self.directory.rollouts, self.completed or -1)
        # again, because starting Ray has replaced the first handler by its own
        self.stop_request.listen(gracefully=True)
        settings = as_written(self._config)
        self._observer.start(max_steps, history)
        if self._guardrails is not None:
            self._guardrails.start(history)
        self._callbacks.start(
            CallbackRun(self.directory.path, settings, self.completed, max_steps, tuple(history), self.stop)
        )
        return self._iterate(self.completed + 1)

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """Write the rollouts of a step, one per line. Rollouts without an advantage have null. With a batch, values of
        tokens are written as `logger.token_level` has it. Steps that `logger.rollout_period` skips are not written."""
        if not self.due(self._config.logger.rollout_period, step):
            return
        with self.phase("recording"):
            self._rollouts.append(step, groups, advantages, batch=batch)

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Write the rollouts of a validation, one per line, unless `logger.rollout_period` is 0."""
        if self._config.logger.rollout_period:
            with self.phase("recording"):
                self._rollouts.append(step, groups, np.zeros(0), "val")

    def write_rollouts_by(self, writer: RolloutWriter) -> None:
        """Write rollouts with another process that shares the run's folder. It must live as long as the models."""
        self._rollouts.write_elsewhere = writer

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """Return whether something with this period is due after this step.

        A last step that a signal or a time limit decided does not count as the end: there is time for saving only.
        """
        return bool(period and step % period == 0) or (at_end and step == self._max_steps)

    def stop(self, reason: str) -> None:
        """End after the current step, having saved: the goal is met, and the run is finished."""
        self._is_goal_met = self._is_goal_met or not self.stop_request.reason
        self.stop_request.ask(reason)

    def abandon(self, error: BaseException | None) -> None:
        """Write how the run ended, for a process that ends without leaving this context: nothing more is saved."""
        if isinstance(error, SystemExit):
            self.stop_request.unwound_by = self.stop_request.unwound_by or signal.SIGTERM
        self._note_end(error)
        self._metrics.writers.close("failed")

    def _iterate(self, first: int) -> Iterator[int]:
        for step in range(first, self._max_steps + 1):
            if self.stop_request.reason:
                break
            if step == self._last_step:
                self.stop(f"step {step} was the last one asked for")
            self._observer.begin_step(step)
            self._clock.begin(step, self._max_steps)
            yield step
            seconds = self._clock.seconds
            self._metrics.record(step, self._clock.timings(self._metrics.recorded(step), seconds))
            self._metrics.record(step, self._observer.step_metrics())
            self._metrics.write_until(step)
            self._clock.end(self._metrics.last, seconds)
            self._observer.end_step(step, self._metrics.last)
            self.completed = step
            self._finish_save(wait=False)
            event = None if self._guardrails is None else self._guardrails.after_step(step, self._metrics.last)
            if event is not None:
                self._act(event)
            self.stop_request.after_step(seconds, saves=self._saves.checkpoints.begun is not None)
            if self._saving.enabled and (self.saves_next or self.due(self._saving.save_period, step)):
                self.saves_next = False
                self._save(wait=not self._saving.async_save)
        self._finish()

    def _act(self, event: GuardrailEvent) -> None:
        """Do what a guardrail asks for after a step.

        Raises:
            GuardrailStop: If the run ends.
            GuardrailRestart: If it goes on from a checkpoint with another config.
        """
        assert self._guardrails is not None, "it asked for the action"
        self._finish_save(wait=True)
        if event.action == "rollback":
            broken, suspect = event.first_broken, event.suspect
            # If a rule breaks again in the same steps, its checkpoint may be the cause. An earlier one comes first.
            bounds = (broken,) if suspect is None else (min(suspect, broken), min(suspect + 1, broken), broken)
            found = next(filter(None, (self._saves.checkpoints.newest(before=bound) for bound in bounds)), None)
            if found is not None:
                self._saves.checkpoints.set_aside(found[0], "rolled_back")
                raise GuardrailRestart(replace(event, resumes_after=found[0]))
            kept = ", ".join(f"step_{step}" for step in RunFolder(self.directory.path).checkpoint_steps()) or "none"
            raise GuardrailStop(
                f"{event}, from step {event.onset} on, but the run has no checkpoint before step {event.first_broken} "
                f"to go back to (it has {kept}). Lower checkpointing.save_period, or raise checkpointing.keep_top_k, "
                "in a new run"
            )
        if self._saving.enabled:
            self._save(wait=True)
        if event.action == "stop":
            self._guardrails.note(event)
            raise GuardrailStop(
                f"{event}, so the run ends after step {event.step}. The same command resumes it, with the rule changed "
                f"or removed (guardrails.{event.rule})"
            )
        raise GuardrailRestart(event)

    def _finish(self) -> None:
        """Save the last complete step if that has not been saved."""
        self._rollouts.flush()
        self._finish_save(wait=True)
        # the goal may have been met as the step was saved
        lacks_export = self._is_goal_met and self._saving.export_period is not None and self._exported < self.completed
        if self._saving.enabled and (self.completed > self.saved or lacks_export):
            if self.has_moved_on:
                left = (
                    "step %d was left before its end, and step %d can no longer be saved; the newest checkpoint is %d"
                )
                _logger.warning(left, self.completed + 1, self.completed, self.saved)
            else:
                self._save(wait=True)
        self.stop_request.listen(gracefully=False)

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
        step = self._saves.checkpoints.begun
        if isinstance(error, Exception) and not isinstance(error, (WorkerDied, WorkerError)):
            try:
                self._finish_save(wait=True)
            except Exception as failure:  # noqa: BLE001  # the first error is the one to raise
                _logger.warning("the checkpoint of step %d was not completed: %s", step, failure)
        self._saves.checkpoints.abandon()

    def _save(self, *, wait: bool) -> None:
        """Begin a save of the last complete step, and complete it or leave it under way."""
        self._rollouts.flush()
        self._metrics.file.sync()
        self._finish_save(wait=True)
        period = self._saving.export_period
        exports = period is None or self._is_goal_met or self.due(period, self.completed, at_end=True)
        if exports:
            self._exported = self.completed
        self._saves.begin(self.completed, self._metrics.last, exports=exports, wait=wait)
        if wait:
            self._finish_save(wait=True)

    def _finish_save(self, *, wait: bool) -> None:
        """Complete the save under way, if it is written, and report it."""
        path = self._saves.finish(wait=wait)
        if path is None:
            return
        self._note("running")
        if self._pusher is not None:
            self._pusher.saved(self.saved, path)
        self._observer.saved(self.saved)
        self._callbacks.saved(self.saved, path)

    @contextmanager
    def _writing_stacks(self) -> Iterator[None]:
        """Let this process write its stacks on request. The files belong to the processes of one start."""
        folder = self.directory.logs / STACKS_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        path = write_stacks_of("driver", folder)
        try:
            yield
        finally:
            # a failing disk refuses this too, which must not hide the error that ended the run
            with suppress(OSError):
                stop_writing_stacks(path)
            shutil.rmtree(folder, ignore_errors=True)

    def _note_end(self, error: BaseException | None) -> None:
        """Write into the run directory how the run ended, tell callbacks, and end pushes."""
        reason = self.stop_request.reason
        status: EndStatus = "finished" if error is None and self.is_finished else "interrupted"
        if isinstance(error, Exception):
            status = "interrupted" if isinstance(error, DevicesLost | JudgeBudgetSpent) else "failed"
            reason = (str(error) or type(error).__name__).partition("\n")[0]
        elif error is not None:
            reason = self.stop_request.why_unwound(error, has_begun=self.has_begun)
        elif self.is_finished and not self._is_goal_met:
            reason = ""
        self._note(status, reason)
        end = RunEnd(status, reason, self.completed, self._max_steps, self._metrics.last)
        self._observer.end(end)
        self._callbacks.end(end)
        at_once = error is not None and not isinstance(error, Exception)
        told: EndStatus = "interrupted" if status == "failed" and self._restarts() else status
        self._metrics.writers.close(told, at_once=at_once)
        if self._pusher is not None:
            self._pusher.end(is_finished=status == "finished", at_once=at_once)

    def _note(self, status: Status, reason: str = "") -> None:
        """Bring `state.json` up to date. A file that cannot be written is reported and costs nothing."""
        self._state = replace(self._state, status=status, reason=reason)
        if self.has_begun:
            best = self._metrics.best.best
            self._state = replace(self._state, step=self.completed, best=best, saved=self.saved)
        self._state.write(self.directory.path)
