"""The saves of a run: started between two steps, finished there or after later steps, and restored."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import CheckpointDamaged, RunDirectoryError
from rl_core.model import Saved
from rl_core.run import Checkpointable
from rl_launch.session.checkpoints.checkpoints import Checkpoints, written_at
from rl_launch.session.directory.branch import Branch
from rl_launch.session.step_clock import StepClock
from rl_launch.session.stop import StopRequest

_logger = logging.getLogger(__name__)


@dataclass
class _SaveTimes:
    """The times of a save under way.

    Args:
        begun_at: When it began, by `time.monotonic`.
        begun_wall: The same by the clock of the file system.
        blocked_s: Seconds for which it has held up the steps.
    """

    begun_at: float = field(default_factory=time.monotonic)
    begun_wall: float = field(default_factory=time.time)
    blocked_s: float = 0.0

    @property
    def so_far_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun_at


class SaveProtocol:
    """Saves and restores the models and the loop state of a run.

    One save is under way at a time::

        saves.find(branch)                # which checkpoint the run continues from
        saves.restore(models, state)      # step 0 if there is none
        saves.begin(step, metrics, exports=True, wait=False)
        ...                               # steps pass while the models write their copies
        saves.finish(wait=False)          # the checkpoint, once it is complete

    Args:
        checkpoints: The checkpoints of the run directory.
        clock: Shows saves, and measures the restoring.
        stop: Learns the duration of saves.

    Attributes:
        saved: Step of the newest checkpoint; 0 before there is one.
    """

    def __init__(self, checkpoints: Checkpoints, clock: StepClock, stop: StopRequest) -> None:
        self._checkpoints = checkpoints
        self._clock = clock
        self._stop = stop
        self._branch: Branch | None = None
        self._found: tuple[int, Path] | None = None
        self._models: Mapping[str, Saved] = {}
        self._state: Mapping[str, Checkpointable] = {}
        self._times = _SaveTimes()
        self.saved = 0

    @property
    def under_way(self) -> int | None:
        """Step of the save under way."""
        return self._checkpoints.begun

    def find(self, branch: Branch | None) -> int:
        """Find the checkpoint that the run continues from, its own newest or a checkpoint of another run, and put aside
        what is later; returns its step, or 0.
        """
        self._branch = branch
        self._found = self._checkpoints.newest()
        if self._found is None and branch is not None:
            branch.require()
            self._found = branch.step, branch.checkpoint
        step = self._found[0] if self._found else 0
        self._checkpoints.tidy(step)
        return step

    def restore(self, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]) -> int:
        """Restore the checkpoint that was found, or an earlier one if it is damaged; returns its step, or 0.

        Args:
            models: The models that train, by role; later saves write the same.
            state: The state of the loop, likewise.

        Raises:
            RunDirectoryError: If the checkpoint lacks one of them.
        """
        self._models, self._state = models, state
        if self._found is None:
            return 0
        step, path = self._found
        if self._branch is not None and path == self._branch.checkpoint:
            with self._clock.phase("restoring"):
                self._restore_branch(self._branch)
        else:
            with self._clock.phase("restoring"):
                step = self._restore_newest(step, path)
            _logger.info("resuming after step %d", step)
        self.saved = step
        return step

    def begin(self, step: int, metrics: Mapping[str, float], *, exports: bool, wait: bool) -> None:
        """Begin to save the present state, which is that after a step; no save may be under way.

        Args:
            step: Last step of the saved state.
            metrics: Metrics of the step.
            exports: True to also write the models as Hugging Face files.
            wait: True to return when the models are written; otherwise they continue to write their copies.
        """
        self._times = _SaveTimes()
        with self._clock.showing("saving"):
            self._checkpoints.begin(
                step, models=self._models, state=self._state, metrics=metrics, exports=exports, wait=wait
            )
            self._times.blocked_s = self._times.so_far_s

    def finish(self, *, wait: bool) -> Path | None:
        """Complete the save under way, if it is written; returns its checkpoint, or None.

        Args:
            wait: Wait until it is written.
        """
        step = self.under_way
        if step is None:
            return None
        asked = time.monotonic()
        with self._clock.showing("saving"):
            path = self._checkpoints.finish(wait=wait)
        finish_s = time.monotonic() - asked
        so_far = self._times.so_far_s
        if path is None:
            self._stop.after_save(so_far)
            return None
        self.saved = step
        self._times.blocked_s += finish_s
        # the rest of a step after the last file was written does not count to the save
        alone = written_at(path) - self._times.begun_wall + finish_s
        self._stop.after_save(min(so_far, max(self._times.blocked_s, alone)))
        # a save beside the steps holds them up for only a part of its time
        blocked = self._times.blocked_s
        held = f", {blocked:.1f} s of it between steps" if blocked < so_far - 0.1 else ""
        _logger.info("saved checkpoint %s in %.1f s%s", path.name, so_far, held)
        return path

    def abandon(self) -> None:
        """Remove everything of the save under way."""
        self._checkpoints.abandon()

    def _restore_newest(self, step: int, path: Path) -> int:
        while True:
            try:
                self._checkpoints.restore(path, models=self._models, state=self._state)
                return step
            except CheckpointDamaged as error:
                step, path = self._checkpoints.before(step, str(error))
                self._checkpoints.tidy(step)

    def _restore_branch(self, branch: Branch) -> None:
        try:
            state = self._state if branch.keeps_position else {}
            self._checkpoints.restore(branch.checkpoint, models=self._models, state=state)
        except CheckpointDamaged as error:
            raise RunDirectoryError(f"cannot branch: {error}. Branch from another step.") from None
        data = "" if branch.keeps_position else "; the data or seed differs, so it starts at the beginning of the data"
        _logger.info("branching from %s at step %d%s", branch.run_dir, branch.step, data)
