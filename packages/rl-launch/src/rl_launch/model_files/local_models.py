"""Models on this machine by name: models made here, so that a first run needs no download, and models of runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core import resolve
from rl_core.config import Problem, RawConfig
from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.model_config import ModelConfig
from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, EXPORT, exported_model
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RUNS, no_run, runs_in
from rl_launch.run_session.directory.writable import check_writable
from rl_launch.worker_envs.node_build import default_root
from rl_launch.worker_envs.provision import check_home

_log = logging.getLogger(__name__)

TINY = "tiny-arithmetic"
"""A Qwen3 of about 0.7M parameters with random weights, and a tokenizer of single characters."""

TINY_VISION = "tiny-vision"
"""A Qwen2.5-VL of about 0.6M parameters with random weights, and a tokenizer of single characters."""

WARMED_UP: Mapping[str, str] = {
    "tiny-arithmetic-sft": "sft-arithmetic",
    "tiny-tools-sft": "sft-tools-tiny",
    "tiny-hints-sft": "sft-hints-tiny",
    "tiny-search-sft": "sft-search-tiny",
    "tiny-calls-sft": "sft-calls-tiny",
    "tiny-textarena-sft": "sft-textarena-tiny",
    "tiny-code-sft": "sft-code-tiny",
    "tiny-sliding-puzzle-sft": "sft-sliding-puzzle-tiny",
    "tiny-nim-sft": "sft-nim-tiny",
    "tiny-proposer-sft": "sft-proposer-tiny",
    "tiny-vision-sft": "sft-vlm-tiny",
    "tiny-arithmetic-rm": "rm-tiny",
}
"""The same models after a recipe, by name: after supervised fine-tuning they get some rows right, so that rewards
differ from the first step; one is a reward model."""

MADE_HERE = frozenset({TINY, TINY_VISION, *WARMED_UP})
"""Names of the models that are made on this machine."""

_OF_IMAGES = frozenset({TINY_VISION, "tiny-vision-sft"})
_SUFFIX = re.compile(r":(?:best|last|(?:step_)?\d+)$")
_FOLDERS = {
    ("model_name",): EXPORT,
    ("tokenizer", "name"): EXPORT,
    ("speculation", "model"): EXPORT,
    ("lora_cfg", "adapter"): ADAPTER,
}
"""The folder of a checkpoint that a key takes, by the end of the key."""


def model_folders(models: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Return the folders of this machine that models or tokenizers are loaded from, by key.

    Args:
        models: Models, by the key of their section.
    """
    named = {f"{key}.model_name": model.model_name for key, model in models.items()}
    named |= {f"{key}.tokenizer.name": model.tokenizer.name or "" for key, model in models.items()}
    return {key: name for key, name in named.items() if name and Path(name).is_dir()}


def models_folder() -> Path:
    """Return the folder of the models that are made here."""
    return default_root().parent / "models"


def writable_models_folder() -> Path:
    """Return the folder of the models that are made here, before one is made.

    Raises:
        RunDirectoryError: If it cannot be written to.
    """
    check_home()
    check_writable(models_folder(), remedy="Set RL_HOME to a folder that you may write to.")
    return models_folder()


def untrained_model(name: str) -> Path:
    """Return the folder of the untrained model that one of `MADE_HERE` is or begins as, made if it does not exist yet.
    It has the tokenizer and the layers of the model."""
    return tiny_vision_model() if name in _OF_IMAGES else tiny_model()


def tiny_vision_model() -> Path:
    """Return the folder of `tiny-vision`, made if it does not exist yet."""
    return _made(TINY_VISION, "rl_algos.tiny_model:make_tiny_vision_model")


def tiny_model() -> Path:
    """Return the folder of `tiny-arithmetic`, made if it does not exist yet."""
    return _made(TINY, "rl_algos.tiny_model:make_tiny_model")


def _made(name: str, make: str) -> Path:
    folder = models_folder() / name
    if not (folder / "model.safetensors").exists():
        writable_models_folder()
        _log.info("making %s in %s", name, folder)
        # imports transformers, which takes a second
        resolve(make)(folder)
    return folder


def with_models_of_runs(raw: RawConfig) -> RawConfig:
    """Return a config with the folder of the model or adapter in place of every run that is the value of a key.

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
    """Return the folder of the Hugging Face files of a checkpoint; None if the name is not of a run, or is of a folder
    in a checkpoint.

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
            yield from ((path, value, folder) for end, folder in _FOLDERS.items() if path[-len(end) :] == end)


def absent_run(name: str) -> Problem | None:
    """Return the problem of a path of a run that does not exist, with the command that lists the existing ones; None if
    it is the path of something else.

    A path below `runs` is the path of a run unless a hub model of this name was downloaded. So is a path in a folder
    that contains other runs.
    """
    run = run_of_path(name)
    if run.exists() or len(run.parts) < 2 or run.suffix in (".yaml", ".yml"):
        return None
    if not run.is_absolute() and hub.is_cached("model", name):
        return None
    return no_run(run) if run.parts[0] == RUNS or runs_in(run.parent) else None


def run_of_path(name: str) -> Path:
    """Return the run directory in a path such as `runs/mine/checkpoints/step_3/hf` or `runs/mine:3`, or the path
    itself.
    """
    path = Path(_SUFFIX.sub("", name)).expanduser()
    if "checkpoints" not in path.parts[1:]:
        return path
    return Path(*path.parts[: path.parts.index("checkpoints", 1)])
