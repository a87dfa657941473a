"""The folder of one run: whose it is, which config it holds, and where things are in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path

from rl_core.config import Change, Config, as_written, diff, load, resolve, to_yaml
from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.user_code import SourceFile
from rl_launch.session import lock
from rl_launch.session.lock import DirectoryLock
from rl_launch.session.manifest import sync_folder
from rl_launch.session.run_folder import CONFIG, DESCRIPTION, is_run
from rl_launch.session.user_files import FOLDER, changed_files, copies_of

MAY_CHANGE = (
    "run_dir",
    "checkpointing.*",
    "logger.*",
    "cluster.*",
    "policy.env_vars*",
    "policy.generation.env_vars*",
    "*.max_num_steps",
    "*.max_num_epochs",
    "*.val_period",
    "*.val_at_*",
    "*.val_batches",
    "*.val_global_batch_size",
    "*.val_micro_batch_size",
    "*.val_num_generations_per_prompt",
    "*.max_val_samples",
    "*.stop_at_validation_*",
    "policy.*_cfg.*parallel*_size",
    "policy.generation.*_cfg.*parallel*_size",
    "policy.generation.*_cfg.gpu_memory_utilization",
    "policy.generation.*_cfg.sleep_level",
    "policy.generation.canary_tolerance",
    "policy.generation.weight_sync",
    "env.*.num_workers",
    "env.*.deadline_s",
    "env.*.memory_limit_gib",
    "env.*.env_vars*",
    "data.num_workers",
)
"""Keys that may differ when a run is resumed: how long it runs, how often it validates, saves and logs, and on what."""


class RunDirectory:
    """A run directory, made or reopened.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock = DirectoryLock(self.path)

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One file of rollouts per step."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Logs of the driver and its workers, and TensorBoard's events."""
        return self.path / "logs"

    @property
    def code(self) -> Path:
        """Copies of the files of the user's own code that the config names."""
        return self.path / FOLDER

    def open(self, config: Config, *, fresh: bool = False) -> bool:
        """Take the folder for this run, and say whether it goes on with an earlier one.

        Args:
            config: the resolved config.
            fresh: refuse to go on with an earlier run.

        Raises:
            RunDirectoryError: if the folder is something else's, is in use, holds a run of another config or of other
                code, or is to be `fresh` and is not empty.
        """
        self._make()
        self._lock.acquire()
        try:
            return self._claim(config, fresh=fresh)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process take it."""
        self._lock.release()

    def _make(self) -> None:
        if self.path.is_dir() and self._contents() and not self._is_run():
            raise RunDirectoryError(
                f"{self.path} holds files but no run ({', '.join(self._contents()[:3])}). Choose another run_dir."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{self.path} cannot be made: {error.strerror}. Choose another run_dir.") from None
        if not os.access(self.path, os.W_OK):
            raise RunDirectoryError(f"{self.path} cannot be written to. Choose another run_dir.")

    def _claim(self, config: Config, *, fresh: bool) -> bool:
        resumes = self._is_run()
        if fresh and self._contents():
            raise RunDirectoryError(
                f"{self.path} is not empty, and --fresh starts anew. "
                "Choose another run_dir, remove it, or leave --fresh out to resume."
            )
        copies = copies_of(config)
        if resumes:
            self._compare(config)
            self._compare_code(copies)
        for folder in (self.rollouts, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        self._write(self.config, to_yaml(config))
        for name, file in copies.items():
            self.code.mkdir(exist_ok=True)
            self._write(self.code / name, file.text)
        if not resumes:
            self._write(self.path / DESCRIPTION, json.dumps(_description(config), indent=2) + "\n")
        return resumes

    def _is_run(self) -> bool:
        return is_run(self.path)

    def _contents(self) -> list[str]:
        """Names in the folder, without what a start that was cut short leaves behind."""
        own = {lock.FILE_NAME, *(folder.name for folder in (self.rollouts, self.checkpoints, self.logs, self.code))}
        unfinished = {f"{CONFIG}.part", f"{DESCRIPTION}.part", *own}
        if not (self.path / DESCRIPTION).exists() and not any(self.checkpoints.glob("*")):
            unfinished.add(CONFIG)
        names = sorted(entry.name for entry in self.path.iterdir())
        if set(names) <= unfinished and lock.FILE_NAME in names and not self._is_run():
            return []
        return [name for name in names if name != lock.FILE_NAME]

    def _compare(self, config: Config) -> None:
        try:
            earlier = resolve(load(self.config), type(config)).config
        except ConfigError as error:
            raise RunDirectoryError(
                f"{self.config} does not fit what is installed, so the run cannot be resumed: {error}\n"
                "Choose another run_dir."
            ) from None
        refused = list(_refused(diff(earlier, config)))
        if refused:
            raise RunDirectoryError(
                "\n".join(
                    [
                        f"{self.path} holds a run of another config:",
                        *(f"  {change}" for change in refused),
                        "Put these back to resume it, or choose another run_dir.",
                    ]
                )
            )

    def _compare_code(self, copies: dict[str, SourceFile]) -> None:
        # without a checkpoint the run begins anew, and nothing is left of what the earlier code did
        changed = changed_files(self.path, copies) if any(self.checkpoints.glob("step_*")) else []
        if changed:
            raise RunDirectoryError(
                "\n".join(
                    [
                        f"{self.path} holds a run of other code:",
                        *(f"  {line}" for line in changed),
                        "Copy these back to resume it, or choose another run_dir.",
                    ]
                )
            )

    @staticmethod
    def _write(path: Path, text: str) -> None:
        aside = path.with_name(f"{path.name}.part")
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)


def _refused(changes: list[Change]) -> Iterator[Change]:
    for change in changes:
        if not any(fnmatchcase(change.key, pattern) for pattern in MAY_CHANGE):
            yield change


def _description(config: Config) -> dict:
    written = as_written(config)
    ours = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"].startswith("rl-")}
    return {
        "algorithm": written.get("algorithm", ""),
        "model": written.get("policy", {}).get("model_name", ""),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": dict(sorted(ours.items())),
    }
