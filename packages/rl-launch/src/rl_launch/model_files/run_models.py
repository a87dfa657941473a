"""Models and adapters that are named by the run that made them, as `CheckpointName` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.config import RawConfig
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.session.checkpoints.checkpoints import ADAPTER, EXPORT, exported_model
from rl_launch.session.directory.checkpoint_name import CheckpointName

_FOLDERS = {("model_name",): EXPORT, ("tokenizer", "name"): EXPORT, ("speculation", "model"): EXPORT}
_FOLDERS |= {("lora_cfg", "adapter"): ADAPTER}
"""The folder of a checkpoint that a key takes, by the end of the key."""


def with_models_of_runs(raw: RawConfig) -> RawConfig:
    """Return a config with the folder of the model or adapter in place of every run that a key names.

    Raises:
        ConfigError: If a run has no such checkpoint.
    """
    for path, name, kind in _named(raw.plain()):
        key = ".".join(path)
        try:
            folder = model_of_run(name) if kind == EXPORT else adapter_of_run(name)
        except RunDirectoryError as error:
            raise ConfigError(f"{key}: {error}") from None
        if folder is not None:
            nested: dict[str, Any] = {path[-1]: str(folder)}
            for section in reversed(path[:-1]):
                nested = {section: nested}
            raw = raw.with_values(nested, f"{key}={name}")
    return raw


def model_of_run(name: str) -> Path | None:
    """Return the folder of the Hugging Face files of a checkpoint; None if the text names no run, or a folder in a
    checkpoint.

    Raises:
        RunDirectoryError: If the run has no such checkpoint, or it has no such files.
    """
    found = CheckpointName.parse(name)
    return None if found is None or found.part else exported_model(found.checkpoint())


def adapter_of_run(name: str) -> Path | None:
    """Return the folder of the adapters of a checkpoint; see `model_of_run`.

    Raises:
        RunDirectoryError: If the run has no such checkpoint, or trained no adapters.
    """
    found = CheckpointName.parse(name)
    if found is None or found.part:
        return None
    folder = found.checkpoint() / ADAPTER
    if not folder.is_dir():
        raise RunDirectoryError(f"{found.checkpoint()} has no adapters, because its run trained none")
    return folder


def _named(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _named(value, path)
        elif isinstance(value, str):
            for end, folder in _FOLDERS.items():
                if path[-len(end) :] == end:
                    yield path, value, folder
