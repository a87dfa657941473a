"""Models that are named by the run that made them: `RUN`, `RUN:STEP` or `RUN:best`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.config import RawConfig
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.session.checkpoints.checkpoints import checkpoint_at, exported_model, newest_checkpoint
from rl_launch.session.directory.run_folder import RunFolder, is_run

BEST = "best"
"""In place of a step: the checkpoint with the best value of `checkpointing.metric_name`."""

_NAME = re.compile(rf"(?P<run>.+?)(?::(?P<which>{BEST}|(?:step_)?\d+)|/checkpoints/step_(?P<step>\d+)/?)?")
_KEY = "model_name"


def with_models_of_runs(raw: RawConfig) -> RawConfig:
    """Return a config with the folder of the model in place of every run that a `model_name` names.

    Raises:
        ConfigError: If a run has no such checkpoint.
    """
    for path, name in _named(raw.plain()):
        key = ".".join(path)
        try:
            folder = model_of_run(name)
        except RunDirectoryError as error:
            raise ConfigError(f"{key}: {error}") from None
        if folder is not None:
            nested: dict[str, Any] = {path[-1]: str(folder)}
            for section in reversed(path[:-1]):
                nested = {section: nested}
            raw = raw.with_values(nested, f"{key}={name}")
    return raw


def model_of_run(name: str) -> Path | None:
    """Return the folder of the Hugging Face files of a checkpoint; None if the text names no run.

    Args:
        name: `RUN` for its newest checkpoint, `RUN:STEP`, `RUN:best`, or the folder of a checkpoint.

    Raises:
        RunDirectoryError: If the run has no such checkpoint, or it has no such files.
    """
    run, which = parts_of(name)
    return exported_model(checkpoint_of(run, which)) if is_run(Path(run).expanduser()) else None


def parts_of(name: str) -> tuple[str, str]:
    """Return the run in a text and what it says of its checkpoints: a step, `best`, or nothing."""
    match = _NAME.fullmatch(name)
    return (match["run"], match["which"] or match["step"] or "") if match is not None else (name, "")


def checkpoint_of(run: str | Path, which: str = "") -> Path:
    """Return a checkpoint of a run: the newest, that of a step, or with `best` the best.

    Raises:
        RunDirectoryError: If there is no such checkpoint.
    """
    folder = Path(run).expanduser()
    if not which:
        return newest_checkpoint(folder)
    if which != BEST:
        return checkpoint_at(folder, int(which.removeprefix("step_")))
    best = RunFolder(folder).best_checkpoint()
    if best is None:
        raise RunDirectoryError(f"{run} has no checkpoint")
    return best.path


def _named(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _named(value, (*above, str(key)))
        elif key == _KEY and isinstance(value, str):
            yield (*above, key), value
