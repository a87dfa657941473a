"""The saves of a run: started between two steps, finished there or after later steps, and restored."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from rl_core.errors import CheckpointDamaged, RunDirectoryError
from rl_core.model import Saved
from rl_core.run import Checkpointable
from rl_launch.run_session.checkpoints.checkpoints import Checkpoints, written_at
from rl_launch.run_session.directory.branch import Branch
from rl_launch.run_session.step_clock import StepClock
from rl_launch.run_session.stop import StopRequest

_logger = logging.getLogger(__name__)


class SaveProtocol:
    """Saves and restores the models and the loop state of a run.

    One save is under way at a time::

        saves.find(branch)                # which checkpoint the run continues from
        saves.restore(models, state)      # step 0 if there is none
        saves.begin(step, metrics, exports=True, wait=False)
        ...                               # steps pass while the models write their copies
        saves.finish(wait=False)          # the checkpoint, once it is complete

    Args:
        checkpoints: See `Attributes`.
        clock: Shows saves, and measures the restoring.
        stop: Learns the duration of saves.

    Attributes:
        checkpoints: The checkpoints of the run directory.
        saved: Step of the newest checkpoint; 0 before there is one.
    """

    def __init__(self, checkpoints: Checkpoints, clock: StepClock, stop: StopRequest) -> None:
        self.checkpoints = checkpoints
        self._clock = clock
        self._stop = stop
        self._branch: Branch | None = None
        self._found: tuple[int, Path] | None = None
        self._models: Mapping[str, Saved] = {}
        self._state: Mapping[str, Checkpointable] = {}
        # When the present save began, by `time.monotonic` and the clock of files, and how long it held up the steps.
        self._begun_at = self._begun_wall = self._blocked_s = 0.0
        self.saved = 0

    def find(self, branch: Branch | None) -> int:
        """Find the checkpoint that the run continues from, its own newest or a checkpoint of another run, and put aside
        what is later; returns its step, or 0.
        """
        self._branch = branch
        self._found = self.checkpoints.newest()
        if self._found is None and branch is not None:
            branch.require()
            self._found = branch.step, branch.checkpoint
        step = self._found[0] if self._found else 0
        self.checkpoints.tidy(step)
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
        branch = self._branch if self._branch is not None and path == self._branch.checkpoint else None
        with self._clock.phase("restoring"):
            while True:
                try:
                    kept = {} if branch is not None and not branch.keeps_position else state
                    self.checkpoints.restore(path, models=models, state=kept)
                    break
                except CheckpointDamaged as error:
                    if branch is not None:
                        raise RunDirectoryError(f"cannot branch: {error}. Branch from another step.") from None
                    problem = f"checkpoint step_{step} is damaged: {error}"
                    earlier = self.checkpoints.newest(before=step, damaged=[problem])
                    assert earlier is not None
                    step, path = earlier
                    self.checkpoints.tidy(step)
            if branch is not None:
                data = (
                    ""
                    if branch.keeps_position
                    else "; the data or seed differs, so it starts at the beginning of the data"
                )
                _logger.info("branching from %s at step %d%s", branch.run_dir, branch.step, data)
        if branch is None:
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
        self._begun_at, self._begun_wall = time.monotonic(), time.time()
        with self._clock.showing("saving"):
            self.checkpoints.begin(
                step, models=self._models, state=self._state, metrics=metrics, exports=exports, wait=wait
            )
            self._blocked_s = time.monotonic() - self._begun_at

    def finish(self, *, wait: bool) -> Path | None:
        """Complete the save under way, if it is written; returns its checkpoint, or None.

        Args:
            wait: Wait until it is written.
        """
        step = self.checkpoints.begun
        if step is None:
            return None
        asked = time.monotonic()
        with self._clock.showing("saving"):
            path = self.checkpoints.finish(wait=wait)
        now = time.monotonic()
        finish_s, so_far = now - asked, now - self._begun_at
        if path is None:
            self._stop.after_save(so_far)
            return None
        self.saved = step
        self._blocked_s += finish_s
        # the rest of a step after the last file was written does not count to the save
        alone = written_at(path) - self._begun_wall + finish_s
        self._stop.after_save(min(so_far, max(self._blocked_s, alone)))
        # A save next to the steps holds them up for only a part of its time.
        held = f", {self._blocked_s:.1f} s of it between steps" if self._blocked_s < so_far - 0.1 else ""
        _logger.info("saved checkpoint %s in %.1f s%s", path.name, so_far, held)
        return path
