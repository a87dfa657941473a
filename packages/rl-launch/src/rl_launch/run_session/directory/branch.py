"""Branches: runs that start from a checkpoint of another run.

A branch has the weights and optimizer state of that checkpoint, and continues its step count, so that schedules and
the length of a run mean the same in both. It draws the prompts that would have come next, unless its data or its seed
differ: then it starts at the beginning of its data. Learning rates, schedules and all else follow from its own config.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.config import Config, WhenChanged, option
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.recording import Recording, changes_since
from rl_launch.run_session.directory.remedies import described, step_bounds
from rl_launch.run_session.directory.run_folder import CONFIG, RunFolder


@dataclass(frozen=True)
class Branch:
    """The start of a branch.

    Args:
        run_dir: Absolute folder of the run that it branches from.
        step: The last step that it shares with that run.
        checkpoint: Absolute folder of the checkpoint of that step.
        changed: Keys whose values differ from that run's, each with both values.
        keeps_position: True if the data continues after that step; otherwise it starts at the beginning.
    """

    run_dir: Path
    step: int
    checkpoint: Path
    changed: tuple[str, ...] = ()
    keeps_position: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the entry in `run.json`."""
        paths = {"run_dir": str(self.run_dir), "checkpoint": str(self.checkpoint)}
        return {**asdict(self), **paths, "changed": list(self.changed)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Branch:
        """Return the branch of an entry in `run.json`."""
        return cls(
            run_dir=Path(data["run_dir"]),
            step=data["step"],
            checkpoint=Path(data["checkpoint"]),
            changed=tuple(data["changed"]),
            keeps_position=data["keeps_position"],
        )

    def require(self) -> None:
        """Refuse a checkpoint that no longer exists.

        Raises:
            RunDirectoryError: naming it.
        """
        if not self.checkpoint.is_dir():
            raise RunDirectoryError(
                f"{self.checkpoint}, from which this run branches, no longer exists, and the run has not saved its "
                "own checkpoint yet. Branch from another step, into another run_dir."
            )


@dataclass(frozen=True)
class BranchPoint:
    """The run and step to branch from.

    Args:
        run: The run to branch from.
        name: Its checkpoint, as the user writes it.
    """

    run: RunFolder
    name: CheckpointName

    @classmethod
    def parse(cls, text: str) -> BranchPoint:
        """Parse a branch point, given as `CheckpointName` reads it.

        Raises:
            RunDirectoryError: If there is no such run.
        """
        name = CheckpointName.parse(text) or CheckpointName(Path(text))
        return cls(RunFolder(name.run), name)

    def __str__(self) -> str:
        path = self.run.path
        return f"{path} at step {self.name.which}" if self.name.step is not None else str(path)

    def is_of(self, branch: Branch) -> bool:
        """Return whether a run that was started as this branch may be resumed by the same command."""
        return (os.path.realpath(self.run.path) == os.path.realpath(branch.run_dir)) and self.name.step in (
            None,
            branch.step,
        )

    def branch(self, config: Config, recording: Recording) -> Branch:
        """Return the start of a branch with this config.

        Raises:
            RunDirectoryError: If there is no complete checkpoint.
            ConfigError: Listing the keys that cannot change in a branch.
        """
        path = self.run.path
        checkpoint = self.name.checkpoint()
        step = int(checkpoint.name.removeprefix("step_"))
        changes = changes_since(path / CONFIG, config, recording)
        for_new_run = [each for each in changes if each.rule is WhenChanged.NEW_RUN]
        if for_new_run:
            option_name = option("--from", "branch_from")
            raise ConfigError(
                "\n".join(
                    [
                        f"a branch of {path} cannot change these keys, because its checkpoint would not fit:",
                        *described(for_new_run),
                        f"Restore them, or start a new run from the weights only: omit {option_name} and set",
                        f"  policy.model_name={checkpoint / 'hf'}",
                    ]
                )
            )
        for key, bound in step_bounds(config).items():
            if bound <= step:
                raise ConfigError(
                    f"{key}: got {bound}, but the branch continues from step {step} of {path}, so it must be greater "
                    f"than {step}. Set, for example, {key}={2 * step}"
                )
        # Other rows come next if the data or a seed differs.
        reread = [each.change.key for each in changes if each.rule is WhenChanged.BRANCH]
        differs = any(re.match(r"data(\.|\[|$)", key) or key.endswith(".seed") for key in reread)
        return Branch(
            run_dir=path.absolute(),
            step=step,
            checkpoint=checkpoint.absolute(),
            changed=tuple(str(each.change) for each in changes if each.change.key != "run_dir"),
            keeps_position=not differs,
        )
