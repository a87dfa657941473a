"""The folder of one run: its owner, its config and its files."""

from __future__ import annotations

import json
import os
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path

from rl_core.config import Config, RuledChange, option, plain, tree_to_yaml
from rl_core.errors import ConfigError, RunDirectoryError, require_readable
from rl_core.user_code import SourceFile
from rl_launch.run_session.checkpoints.checkpoints import saved_checkpoints
from rl_launch.run_session.config import Access
from rl_launch.run_session.directory import lock
from rl_launch.run_session.directory.branch import Branch
from rl_launch.run_session.directory.lock import DirectoryLock
from rl_launch.run_session.directory.recording import (
    CODE,
    Recording,
    WholeConfig,
    changed_files,
    changes_since,
    copies_of,
    kept,
)
from rl_launch.run_session.directory.remedies import refusal, train_command
from rl_launch.run_session.directory.row_files import names_of_run
from rl_launch.run_session.directory.run_folder import CONFIG, DESCRIPTION, RunFolder, is_run
from rl_launch.run_session.directory.run_state import SECTION, Labels, write_labels
from rl_launch.run_session.directory.writable import check_writable, make_folder, write_atomically


class RunDirectory:
    """A run directory, made or reopened.

    Args:
        path: Path of the folder.
        recording: Decides which part of the config is kept.

    Attributes:
        path: Absolute path of the folder.
        config: The resolved config.
        metrics: One JSON object per step.
        rollouts: One file of rollouts per step.
        checkpoints: One folder per checkpoint.
        logs: Logs of the driver and its workers, and TensorBoard's events.
        code: Copies of the files of the user's own code that the config refers to.
        close: Releases the folder for other processes.
    """

    def __init__(self, path: str | Path, recording: Recording | None = None) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config, self.metrics, self.code = self.path / CONFIG, self.path / "metrics.jsonl", self.path / CODE
        self.rollouts, self.checkpoints, self.logs = (self.path / name for name in ("rollouts", "checkpoints", "logs"))
        self._recording = recording or WholeConfig()
        self._lock = DirectoryLock(self.path)
        self.close = self._lock.release

    @property
    def branch(self) -> Branch | None:
        """The checkpoint that its run started from, if it is a branch of another."""
        origin = RunFolder(self.path).description().origin
        return Branch.from_json(origin) if origin else None

    @property
    def labels(self) -> Labels:
        """Name, group, tags and notes of its run."""
        return RunFolder(self.path).description().labels

    def open(
        self, config: Config, *, fresh: bool = False, branch: Branch | None = None, access: Access = "owner"
    ) -> bool:
        """Take the folder for this run; returns whether it continues an earlier one.

        Args:
            config: The resolved config.
            fresh: Refuse to resume an earlier run.
            branch: Start of a new run; an existing run keeps its own.
            access: Readers of a folder that does not exist yet.

        Raises:
            RunDirectoryError: If the folder holds other files, is in use, holds a run with another config or other
                code, or is not empty although `fresh` is set.
        """
        self._make(access)
        self._lock.acquire()
        try:
            return self._claim(config, fresh=fresh, branch=branch)
        except BaseException:
            self.close()
            raise

    def _make(self, access: Access) -> None:
        if self.path.is_dir() and self._contents() and not is_run(self.path):
            raise RunDirectoryError(
                f"{self.path} holds files that do not belong to a run ({', '.join(self._contents()[:3])}). "
                "Choose another run_dir."
            )
        check_writable(self.path)
        for folder in (self.rollouts, self.checkpoints, self.logs):
            # each may be a link to another disk
            if os.path.lexists(folder):
                check_writable(folder, remedy="Make it writable, or choose another run_dir.")
        make_folder(self.path, access)

    def _claim(self, config: Config, *, fresh: bool, branch: Branch | None) -> bool:
        resumes = is_run(self.path)
        if fresh and self._contents():
            raise RunDirectoryError(
                f"{self.path} is not empty, and {option('--fresh', 'fresh=True')} needs an empty folder. "
                "Choose another run_dir, remove it, or leave that out to resume."
            )
        copies = copies_of(config)
        changes: list[RuledChange] = []
        if resumes:
            self._require_checkpoints()
            changes = self._changes(config)
            self._compare_code(copies)
        for folder in (self.rollouts, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        tree = kept(config, self._recording)
        labels = plain(config).get(SECTION) or {}
        if resumes:
            # The labels whose keys were changed are taken over; the others may have been edited in the folder since.
            before = self.labels
            changed = before.updated(labels, [each.change.key for each in changes])
            if changed != before:
                write_labels(self.path / DESCRIPTION, changed)
        write_atomically(self.config, tree_to_yaml(tree))
        for name, file in copies.items():
            self.code.mkdir(exist_ok=True)
            write_atomically(self.code / name, file.text)
        if not resumes:
            installed = {each.metadata["Name"]: each.version for each in distributions()}
            description = {
                "algorithm": tree.get("algorithm", ""),
                "model": tree.get("policy", {}).get("model_name", ""),
                "created": datetime.now().astimezone().isoformat(timespec="seconds"),
                "versions": {name: installed[name] for name in sorted(installed) if name.startswith("rl-")},
                "origin": branch.as_json() if branch is not None else {},
                **Labels.read(labels).as_json(),
            }
            write_atomically(self.path / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        return resumes

    def _contents(self) -> list[str]:
        """Return the entries of the folder, except for leftovers of an interrupted start."""
        own = {folder.name for folder in (self.rollouts, self.checkpoints, self.logs, self.code)}
        unfinished = {f"{CONFIG}.part", f"{DESCRIPTION}.part", *own}
        if not (self.path / DESCRIPTION).exists() and not any(self.checkpoints.glob("*")):
            unfinished.add(CONFIG)
        found = names_of_run(self.path)
        names = sorted(name for name in found if not lock.is_own(name))
        if set(names) <= unfinished and lock.FILE_NAME in found and not is_run(self.path):
            return []
        return names

    def _changes(self, config: Config) -> list[RuledChange]:
        """Return the changes of the config that a run in this folder may be resumed with."""
        require_readable(self.config)
        try:
            changes = changes_since(self.config, config, self._recording)
        except ConfigError as error:
            raise RunDirectoryError(
                f"{self.config} is not valid with the installed packages, so the run cannot be resumed: {error}\n"
                "Choose another run_dir."
            ) from None
        steps = RunFolder(self.path).checkpoint_steps()
        newest = self.checkpoints / f"step_{steps[-1]}" if steps else None
        if message := refusal(str(self.path), changes, kept(config, self._recording), newest):
            raise RunDirectoryError(message)
        return changes

    def _require_checkpoints(self) -> None:
        run, branch = RunFolder(self.path), self.branch
        saved = run.saved_step()
        if saved > (branch.step if branch else 0) and not run.checkpoint_steps():
            raise RunDirectoryError(
                f"{self.path} saved a checkpoint of step {saved}, but {self.checkpoints} contains no checkpoint. "
                "Restore one, or mount its disk, to resume the run. To start over, choose another run_dir, or remove "
                "this one."
            )

    def _compare_code(self, copies: dict[str, SourceFile]) -> None:
        # without a checkpoint the run starts over, and nothing depends on the earlier code
        changed = changed_files(self.path, copies) if saved_checkpoints(self.checkpoints) else []
        if changed:
            lines = [
                f"{self.path} holds a run that was started with other code:",
                *(f"  {line}" for line in changed),
                "Copy these back to resume it, or choose another run_dir. To branch with the current code:",
                f"  {train_command(str(self.path), (), {}, branches=True)}",
            ]
            raise RunDirectoryError("\n".join(lines))
