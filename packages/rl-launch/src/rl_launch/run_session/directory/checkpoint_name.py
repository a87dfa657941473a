"""The ways to name a checkpoint of a run, which every command takes: `RUN`, `RUN:STEP`, `RUN:best` or a path in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.checkpoints.checkpoints import checkpoint_at, newest_checkpoint
from rl_launch.run_session.directory.run_folder import RunFolder, is_run

BEST = "best"
"""In place of a step: the checkpoint with the best value of `checkpointing.metric_name`."""

LAST = "last"
"""In place of a step: the newest checkpoint."""

_WITH_SUFFIX = re.compile(r"(?P<run>.+):(?P<which>[^:/\\]*)")
_WHICH = re.compile(rf"{BEST}|{LAST}|(?:step_)?\d+")
_FOLDER = re.compile(r"step_(\d+)")
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class CheckpointName:
    """A checkpoint of a run, as a user writes it.

    Args:
        run: Folder of the run.
        which: A step as a number, `best` or `last`; empty for the newest.
        part: Path below the checkpoint, such as `hf`; empty for the whole checkpoint.
    """

    run: Path
    which: str = ""
    part: str = ""

    @classmethod
    def parse(cls, text: str | Path) -> CheckpointName | None:
        """Read `RUN`, `RUN:STEP`, `RUN:step_STEP`, `RUN:best`, `RUN:last`, `RUN/checkpoints` or a path of a checkpoint
        or below it; None if it is not a path of a run.

        Raises:
            RunDirectoryError: If the text after the run is not a checkpoint.
        """
        path = Path(text).expanduser()
        match = None if path.exists() else _WITH_SUFFIX.fullmatch(str(path))
        if match is None:
            return cls._of_path(path) or cls._of_path(path.resolve())
        run = cls._of_path(Path(match["run"]))
        if run is None or run.which:
            return None
        if not _WHICH.fullmatch(match["which"]):
            steps = ", ".join(map(str, RunFolder(run.run).checkpoint_steps()))
            raise RunDirectoryError(
                f"{text} names no checkpoint of {run.run}. Write {run.run}:{LAST}, {run.run}:{BEST} or {run.run}:STEP; "
                f"it has {f'checkpoints of steps {steps}' if steps else 'no checkpoint'}"
            )
        return cls(run.run, match["which"].removeprefix("step_"))

    @property
    def step(self) -> int | None:
        """The step that is named by its number; None if it follows from the checkpoints."""
        return int(self.which) if self.which.isdecimal() else None

    def checkpoint(self) -> Path:
        """Return the folder of the checkpoint; the newest complete one if only the run is named.

        Raises:
            RunDirectoryError: If there is no such checkpoint, or it is damaged.
        """
        if self.step is not None:
            return checkpoint_at(self.run, self.step)
        if self.which != BEST:
            return newest_checkpoint(self.run)
        best = RunFolder(self.run).best_checkpoint()
        if best is None:
            raise RunDirectoryError(f"{self.run} has no checkpoint")
        return best.path

    @classmethod
    def _of_path(cls, path: Path) -> CheckpointName | None:
        if is_run(path):
            return cls(path)
        whole = Path(os.path.abspath(path))
        for run, folder in zip(whole.parents, [whole, *whole.parents], strict=False):
            if folder.name == _CHECKPOINTS and is_run(run):
                below = whole.relative_to(folder).parts
                match = _FOLDER.fullmatch(below[0]) if below else None
                if below and match is None:
                    return None
                # The path stays as the user wrote it, if it begins at the run or above it.
                above = len(whole.parts) - len(run.parts) - 1
                written = path.parents[above] if above < len(path.parents) else run
                return cls(written, match[1] if match else "", "/".join(below[1:]))
        return None
