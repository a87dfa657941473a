"""Checks of a model folder without the libraries that load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import Problem, nearest_as_remedy
from rl_core.config.tree import reason as in_words
from rl_core.errors import ConfigError
from rl_core.facts.hf_config import language_fields
from rl_launch.model_files.local_models import absent_run, run_of_path
from rl_launch.model_files.weight_files import INDEX, SINGLE, foreign_kind, listed, shapes_in, weight_file_problems
from rl_launch.run_session.directory.run_folder import is_run

Needed = tuple[tuple[str, ...], str]
"""Alternative files, at least one must exist, and the remedy if none does."""

MODEL_FILES: Sequence[Needed] = (
    (("config.json",), "Save the model there with `save_pretrained`"),
    ((SINGLE, INDEX), "Save the model there with `save_pretrained`, which writes safetensors"),
)

TOKENIZER_FILES: Needed = (
    ("tokenizer.json",),
    "Save a fast tokenizer there with `save_pretrained`, or set policy.tokenizer.name to another one",
)


_WEIGHT = ".weight"
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def folder_problems(key: str, name: str, needed: Sequence[Needed]) -> Iterator[Problem]:
    """Yield the problems of files that are missing from a folder or damaged; none if the name is a hub name.

    Args:
        key: Key of the config whose value is the name.
        name: A folder or a hub name.
        needed: Files that the folder must contain.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if problem := absent_run(name):
            yield problem.at(key)
        elif is_run(run := run_of_path(name)):
            yield Problem(key, "this folder does not exist", got=name, remedy=_exported(run))
        elif name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name):
            remedy = "Pass a folder with Hugging Face files, or a hub name"
            yield Problem(key, "this folder does not exist", got=name, remedy=remedy)
        return
    held = sorted(entry.name for entry in folder.iterdir())
    if "checkpoints" in held and "config.json" not in held:
        yield Problem(key, "this is a run directory, not a model", got=name, remedy=_exported(folder))
        return
    for files, remedy in needed:
        if not set(files) & set(held):
            kind = foreign_kind(folder)
            holds = f"contains {listed(held)}" if held else "is empty"
            reason = f"this folder does not contain {' or '.join(files)}; it {holds}"
            if kind is not None:
                reason = f"{reason}; it is {kind.name}"
            yield Problem(key, reason, got=name, remedy=remedy if kind is None else kind.remedy)
        elif SINGLE in files:
            for damage in weight_file_problems(folder):
                yield Problem(key, f"this folder is damaged: {damage}", got=name)
    if any("config.json" in files for files, _ in needed) and "config.json" in held:
        path, odd = folder / "config.json", ""
        try:
            if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                odd = "it is not a JSON object"
        except (OSError, ValueError, RecursionError) as error:
            odd = in_words(error)
        if odd:
            yield Problem(key, f"{path} is not a valid Hugging Face config: {odd}", remedy="Save the model again")


def hf_config_fields(name: str) -> dict[str, Any]:
    """Return the fields of a language model's Hugging Face config, from its folder or from the hub."""
    return language_fields(whole_config_fields(name))


def whole_config_fields(name: str) -> dict[str, Any]:
    """Return the fields of a model's Hugging Face config, from its folder or from the hub."""
    fields: dict[str, Any] = json.loads((config_folder(name) / "config.json").read_text(encoding="utf-8"))
    return fields


def config_folder(name: str) -> Path:
    """Return the folder with the config of a model: its folder, or its download, which may lack the weights."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # the driver has transformers for tokenizers, which takes a second to import; its config classes import torch
    from transformers.utils import cached_file

    path = cached_file(name, "config.json")
    assert path is not None  # it would have raised
    return Path(path).parent


def layer_names(name: str) -> list[str]:
    """Return the names of the layers with a matrix in the safetensors files of a local folder. Only the headers of the
    files are read; empty if that fails.
    """
    shapes = shapes_in(Path(name).expanduser()).items()
    return sorted(name.removesuffix(_WEIGHT) for name, shape in shapes if name.endswith(_WEIGHT) and len(shape) == 2)


def adapter_problems(key: str, name: str, targets: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of adapter targets that no layer of the model can match, because no layer name ends in them.

    Args:
        key: Key of the targets.
        name: Name of the model; only models in a local folder are checked.
        targets: Layer names, or ends of layer names.
    """
    ends = sorted({layer.rpartition(".")[2] for layer in layer_names(name)})
    # a layer may have another name before its last dot than its weights have in files
    wrong = [target for target in targets if target.rpartition(".")[2] not in ends]
    if ends and wrong:
        remedy = nearest_as_remedy(wrong[0], ends)
        yield Problem(key, f"matches no layer of {name}", got=", ".join(wrong), allowed=listed(ends), remedy=remedy)


def check_models(names: Mapping[str, str]) -> None:
    """Refuse models that are neither on this machine nor available from the hub, before anything is loaded.

    Args:
        names: Folders or hub names by config key.

    Raises:
        ConfigError: If a model is missing; lists all of them.
    """
    problems = [f"{problem.key}: {problem.message}" for problem in absent_models(names)]
    if problems:
        raise ConfigError("\n".join(problems))


def absent_models(names: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each model that is neither on this machine nor available from the hub.

    Args:
        names: Folders or hub names by config key.
    """
    for key, name in names.items():
        found = list(folder_problems(key, name, ()))
        if not found and not Path(name).expanduser().is_dir() and (problem := hub.problem("model", name)):
            found = [Problem(key, f"is {problem}", got=name)]
        yield from found


def _exported(run_dir: Path) -> str:
    """Return the remedy for a path into a run directory: the models that it contains."""
    found = [path.parent for path in run_dir.glob("checkpoints/step_*/hf*/config.json")]
    newest = max((int(path.parent.name.removeprefix("step_")) for path in found), default=None)
    of_newest = sorted(str(path) for path in found if path.parent.name == f"step_{newest}")
    if not of_newest:
        return "The run has no checkpoint with a model yet"
    return f"Pass a model of the run: {listed(of_newest)}"
