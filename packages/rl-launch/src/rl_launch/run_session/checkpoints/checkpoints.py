"""The checkpoints of a run: written aside and renamed, checked before they are used, and thinned out."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_core.errors import RunDirectoryError, WorkerDied
from rl_core.model import Saved, SavedFile
from rl_core.plugins import export_suffixes
from rl_core.run import Checkpointable
from rl_launch.run_session.checkpoints.manifest import FILE_NAME, CheckpointManifest, read_state, sync_path, write_state
from rl_launch.run_session.config import CheckpointingConfig

EXPORT = "hf"
"""Folder within a checkpoint that `transformers` and vLLM load; other models than the policy have a suffix."""

ADAPTER = "adapter"
"""Folder of a checkpoint that `peft` loads, if adapters train; likewise."""

STAGED = ".pushing"
"""Suffix of a folder next to the checkpoints whose files are being pushed."""

_OF_POLICY = export_suffixes({})
_STATE = "state"
_LEFTOVERS = (".saving", ".dropped", STAGED)
_NAME = re.compile(r"step_(\d+)")

_FULL_BELOW_BYTES = 2**20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """A save under way.

    Args:
        step: The step whose state is saved.
        folder: The folder that it is written into.
        models: The models that write.
        metrics: Metrics of the step.
        exported: Files of the exports, by folder.
    """

    step: int
    folder: Path
    models: Mapping[str, Saved]
    metrics: Mapping[str, float]
    exported: Mapping[str, tuple[SavedFile, ...]] = field(default_factory=dict)


class Checkpoints:
    """The folder `checkpoints` of a run directory.

    Args:
        folder: The folder.
        config: How many to keep, and which.
        exports: Roles of the models whose Hugging Face files are saved, and the suffixes of their folders.
    """

    def __init__(self, folder: Path, config: CheckpointingConfig, *, exports: Mapping[str, str] = _OF_POLICY) -> None:
        self._folder = folder
        self._config = config
        self._exports = exports
        self._open: Save | None = None

    def save(
        self,
        step: int,
        *,
        models: Mapping[str, Saved],
        state: Mapping[str, Checkpointable],
        metrics: Mapping[str, float],
    ) -> Path:
        """Save the state after a step, and remove checkpoints that need not be kept.

        Each model is under its name, Hugging Face files of those that are exported under `hf` and their adapters, if
        they have some, under `adapter`, loop state under `state`.
        """
        self.begin(step, models=models, state=state, metrics=metrics, wait=True)
        path = self.finish()
        assert path is not None
        return path

    def begin(
        self,
        step: int,
        *,
        models: Mapping[str, Saved],
        state: Mapping[str, Checkpointable],
        metrics: Mapping[str, float],
        exports: bool = True,
        wait: bool = False,
    ) -> None:
        """Start a save of the current state. No other save may be in progress.

        Args:
            step: Last step of the saved state.
            models: Models to save, by the name of their subfolder.
            state: Further state of the loop, by name.
            metrics: Metrics of the step.
            exports: True to also write the models as Hugging Face files; adapters are always written.
            wait: True to return when the models are written; otherwise they continue to write their copies.
        """
        assert self._open is None, f"the save of step {self._open} is under way"
        folder = self._folder / f".step_{step}.saving"
        self._open = Save(step, folder, dict(models), dict(metrics))
        shutil.rmtree(folder, ignore_errors=True)
        with self._dropped_if_it_fails():
            folder.mkdir(parents=True)
            # The export is first, so that it does not compete with the writes that continue after the steps.
            exported: dict[str, tuple[SavedFile, ...]] = {}
            for role, model in models.items():
                if role in self._exports:
                    whole, adapter = (f"{name}{self._exports[role]}" for name in (EXPORT, ADAPTER))
                    if exports:
                        (folder / whole).mkdir()
                        exported[whole] = model.export(str(folder / whole))
                    exported[adapter] = model.export_adapter(str(folder / adapter))
            self._open = replace(self._open, exported=exported)
            for name, model in models.items():
                (folder / name).mkdir()
                model.save(str(folder / name), wait=wait)
            for name, part in state.items():
                write_state(folder / _STATE, name, part.state())

    def finish(self, *, wait: bool = True) -> Path | None:
        """Return the checkpoint of the save under way, once it is complete; None before that, or if there is none.

        Args:
            wait: Return when the models are written.

        Raises:
            The error that occurred while writing; nothing is left of that save then.
        """
        if self._open is None:
            return None
        with self._dropped_if_it_fails():
            written: dict[str, tuple[SavedFile, ...]] = {}
            for name, model in self._open.models.items():
                files = model.finish_save(wait=wait)
                if files is None:
                    return None
                written[name] = files
            save = self._open
            files_of = {**written, **save.exported}
            CheckpointManifest.of(save.folder, save.step, save.metrics, written=files_of, own=[_STATE]).write(
                save.folder
            )
            target = self._folder / f"step_{save.step}"
            self._drop(target)
            save.folder.rename(target)
            sync_path(self._folder)
        self._open = None
        self._thin_out()
        return target

    @property
    def begun(self) -> int | None:
        """Step of the save under way."""
        return None if self._open is None else self._open.step

    def abandon(self) -> None:
        """Remove everything of the save under way."""
        if self._open is not None:
            shutil.rmtree(self._open.folder, ignore_errors=True)
            self._open = None

    def restore(self, path: Path, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]) -> None:
        """Load models and loop state from a checkpoint; the models' ranks compare the contents of the files that they
        read.

        Raises:
            RunDirectoryError: If it lacks one of them.
            CheckpointDamaged: naming a file whose contents are not those that were saved.
        """
        wanted = [*(path / name for name in models), *(path / _STATE / f"{name}.json" for name in state)]
        lacking = [each.relative_to(path).as_posix() for each in wanted if not each.exists()]
        if lacking:
            raise RunDirectoryError(f"{path} has no {', '.join(lacking)}: it was saved by a different kind of run")
        manifest = CheckpointManifest.read(path)
        manifest.verify(path, _STATE)
        for name, model in models.items():
            model.load(str(path / name), files=manifest.files_of(name))
        for name, part in state.items():
            part.restore(read_state(path / _STATE, name))

    def newest(self, *, before: int | None = None, damaged: Sequence[str] = ()) -> tuple[int, Path] | None:
        """Return the step and the folder of the newest complete checkpoint; logs damaged ones and changes nothing.

        Names and sizes of files are compared; their contents when they are loaded.

        Args:
            before: Only consider checkpoints of earlier steps.
            damaged: Sentences on checkpoints that turned out to be damaged when they were loaded.

        Raises:
            RunDirectoryError: If all checkpoints are damaged.
        """
        problems = list(damaged)
        for step, path in reversed(saved_checkpoints(self._folder)):
            if before is not None and step >= before:
                continue
            problem = _damage(path)
            if not problem:
                for each in problems:
                    _logger.warning("%s; taking %s", each, path.name)
                return step, path
            problems.append(f"checkpoint {path.name} is damaged: {problem}")
        if problems:
            remedy = "No complete checkpoint is left. Choose another run_dir to start over."
            raise RunDirectoryError("\n".join([*problems, remedy]))
        return None

    def tidy(self, step: int) -> None:
        """Remove the remains of a killed process, and set aside damaged checkpoints after the one that is resumed."""
        self.set_aside(step, "damaged")
        for leftover in (path for ending in _LEFTOVERS for path in self._folder.glob(f".*{ending}")):
            shutil.rmtree(leftover, ignore_errors=True)

    def set_aside(self, step: int, reason: str) -> None:
        """Give the checkpoints after a step names that are no checkpoint's: `REASON_step_N`. They are kept for
        inspection."""
        for later in (path for number, path in saved_checkpoints(self._folder) if number > step):
            aside = later.with_name(f"{reason}_{later.name}")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)

    @contextmanager
    def _dropped_if_it_fails(self) -> Iterator[None]:
        """Remove everything of a save that fails, after other models' writes have ended.

        Raises:
            OSError: If the disk was full, whatever the message of the library that wrote tensors.
        """
        try:
            yield
        except BaseException as error:
            if self._open is not None and isinstance(error, Exception):
                for model in self._open.models.values():
                    with suppress(Exception):
                        model.finish_save()
            is_full = False
            with suppress(OSError):
                is_full = shutil.disk_usage(self._folder).free < _FULL_BELOW_BYTES
            self.abandon()
            if is_full and isinstance(error, Exception) and not isinstance(error, WorkerDied):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder)) from error
            raise

    def _thin_out(self) -> None:
        keep, key = self._config.keep_top_k, self._config.metric_key

        def rank(entry: tuple[int, Path]) -> tuple[bool, float, int]:
            """Return a rank that is larger for a better checkpoint."""
            step, path = entry
            value = None
            with suppress(ValueError):
                value = CheckpointManifest.read(path).metrics.get(key) if key else None
            if value is None or value != value:
                return False, 0.0, step
            return True, value if self._config.higher_is_better else -value, step

        saved = saved_checkpoints(self._folder)
        if keep is None or len(saved) <= keep:
            return
        try:
            newest = saved[-1][1]
            best = sorted(saved, key=rank, reverse=True)[:keep]
            kept = {newest, *(path for _, path in best)}
            for _, path in saved:
                if path not in kept:
                    self._drop(path)
                    _logger.info("removed checkpoint %s: checkpointing.keep_top_k is %d", path.name, keep)
        except OSError as error:
            # a save that is complete does not fail because of an earlier one; the next save tries again
            _logger.warning("checkpoints were not removed: %s", error)

    def _drop(self, path: Path) -> None:
        if path.exists():
            # a rename is atomic, removal is not
            aside = path.with_name(f".{path.name}.dropped")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside)


def saved_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of the checkpoints in a folder, oldest first; none if it does not exist.

    Raises:
        OSError: If the folder cannot be read. `Path.glob` would find nothing then, and a run would start over.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), folder / name) for name in names if (match := _NAME.fullmatch(name)))


def newest_checkpoint(run_dir: str | Path) -> Path:
    """Return the newest complete checkpoint of a run directory; its Hugging Face files are in `hf`.

    Raises:
        RunDirectoryError: If there is none.
    """
    found = Checkpoints(Path(run_dir).expanduser() / "checkpoints", CheckpointingConfig()).newest()
    if found is None:
        raise RunDirectoryError(f"{run_dir} has no checkpoint")
    return found[1]


def exported_model(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint with the policy's Hugging Face files.

    Raises:
        RunDirectoryError: If it has none, naming checkpoints of its run that have them.
    """
    if (checkpoint / EXPORT).is_dir():
        return checkpoint / EXPORT
    having = [each.name for _, each in saved_checkpoints(checkpoint.parent) if (each / EXPORT).is_dir()]
    instead = f"Use {' or '.join(having)}, or convert" if having else "Convert"
    raise RunDirectoryError(
        f"{checkpoint} has no Hugging Face files, because of checkpointing.export_period. {instead} it: rl convert "
        f"{checkpoint} FOLDER"
    )


def checkpoint_at(run_dir: str | Path, step: int) -> Path:
    """Return the checkpoint of a run directory at a step.

    Raises:
        RunDirectoryError: If there is none, naming those there are, or it is damaged.
    """
    path = Path(run_dir).expanduser() / "checkpoints" / f"step_{step}"
    if not path.is_dir():
        saved = [each.name for _, each in saved_checkpoints(path.parent)]
        known = f"it has {', '.join(saved)}" if saved else "it has none"
        raise RunDirectoryError(
            f"{run_dir} has no checkpoint of step {step}; {known}. A run saves every checkpointing.save_period steps, "
            "and keeps checkpointing.keep_top_k checkpoints (null: all)."
        )
    if problem := _damage(path):
        raise RunDirectoryError(f"{path} is damaged: {problem}. Choose another step.")
    return path


def saved_state(checkpoint: Path, name: str) -> Mapping[str, Any]:
    """Return the state of a loop that a checkpoint holds under a name; raises an `OSError` or a `ValueError` if it
    cannot be read."""
    return read_state(checkpoint / _STATE, name)


def written_at(path: Path) -> float:
    """When the last file of a checkpoint's models and loop state was written, by the file system's clock."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != FILE_NAME)
    return max((file.stat().st_mtime for file in files), default=0.0)


def _damage(path: Path) -> str:
    try:
        return CheckpointManifest.read(path).damage(path)
    except ValueError as error:
        return str(error)
