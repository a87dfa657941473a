"""Checks of a model's folder, without the libraries that load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import Problem, did_you_mean
from rl_core.errors import ConfigError
from rl_core.model_config import language_fields
from rl_launch.model_files.absent_run import absent_run, run_of_path
from rl_launch.model_files.foreign_folders import foreign_kind
from rl_launch.model_files.weight_files import INDEX, SINGLE, Header, weight_file_problems
from rl_launch.session.directory.run_folder import is_run

Needed = tuple[tuple[str, ...], str]
"""Alternative files, one of which must exist, and the remedy if none does."""

MODEL_FILES: Sequence[Needed] = (
    (("config.json",), "save the model there with `save_pretrained`"),
    (
        (SINGLE, INDEX),
        "save the model there with `save_pretrained`, which writes safetensors",
    ),
)

TOKENIZER_FILES: Needed = (
    ("tokenizer.json",),
    "save a fast tokenizer there with `save_pretrained`, or name another one in policy.tokenizer.name",
)


_WEIGHT = ".weight"
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def folder_problems(key: str, name: str, needed: Sequence[Needed]) -> Iterator[Problem]:
    """Files that a folder lacks, and those that are damaged; none if the name is one on the hub.

    Args:
        key: that names the folder.
        name: a folder or a hub name.
        needed: what the folder must hold.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if problem := absent_run(name):
            yield Problem(key, problem)
        elif is_run(run := run_of_path(name)):
            yield Problem(key, f"folder {name!r} does not exist; {_exported(run)}")
        elif name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name):
            yield Problem(key, f"folder {name!r} does not exist; give one with Hugging Face files, or a hub name")
        return
    held = sorted(entry.name for entry in folder.iterdir())
    if "checkpoints" in held and "config.json" not in held:
        yield Problem(key, f"{name!r} is a run directory; {_exported(folder)}")
        return
    for files, remedy in needed:
        if not set(files) & set(held):
            advice = foreign_kind(folder) or remedy
            yield Problem(key, f"the folder {name!r} has no {' or '.join(files)} (it holds {_listed(held)}); {advice}")
        elif SINGLE in files:
            for damage in weight_file_problems(folder):
                yield Problem(key, f"the folder {name!r} is damaged: {damage}")
    if any("config.json" in files for files, _ in needed) and "config.json" in held:
        yield from _unreadable(key, folder / "config.json")


def hf_config_fields(name: str) -> dict[str, Any]:
    """Fields of a language model's Hugging Face config, from its folder or from the hub."""
    # the driver has transformers for tokenizers, which takes a second to import; its classes of configs import torch
    from transformers.utils import cached_file

    path = cached_file(str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name, "config.json")
    assert path is not None  # it would have raised
    return language_fields(json.loads(Path(path).read_text(encoding="utf-8")))


def layer_names(name: str) -> list[str]:
    """Names of the layers with a matrix in the safetensors files of a local folder, from their headers alone; empty if
    none can be read.
    """
    found: set[str] = set()
    for file in sorted(Path(name).expanduser().glob("*.safetensors")):
        try:
            shapes = Header.read(file).shapes
        except ValueError:
            return []
        found.update(
            tensor.removesuffix(_WEIGHT)
            for tensor, shape in shapes.items()
            if tensor.endswith(_WEIGHT) and len(shape) == 2
        )
    return sorted(found)


def adapter_problems(key: str, name: str, targets: Sequence[str]) -> Iterator[Problem]:
    """Targets of adapters that no layer of the model can match: none ends as they do.

    Args:
        key: that names the targets.
        name: of the model; nothing is said of one that is not in a local folder.
        targets: names of layers, or ends of names.
    """
    ends = sorted({layer.rpartition(".")[2] for layer in layer_names(name)})
    # a layer may have another name before its last dot than its weights have in files
    wrong = [target for target in targets if target.rpartition(".")[2] not in ends]
    if ends and wrong:
        near = did_you_mean(wrong[0], ends)
        yield Problem(key, f"got {', '.join(wrong)}, which matches no layer of {name}{near}; it has {_listed(ends)}")


def check_models(names: Mapping[str, str]) -> None:
    """Refuse models that are neither on this machine nor available from the hub, before anything is loaded.

    Args:
        names: folders or hub names by the key that names them.

    Raises:
        ConfigError: listing every one.
    """
    problems = [f"{problem.key}: {problem.message}" for problem in absent_models(names)]
    if problems:
        raise ConfigError("\n".join(problems))


def absent_models(names: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each model that is neither on this machine nor available from the hub.

    Args:
        names: Folders or hub names by the key that names them.
    """
    for key, name in names.items():
        found = list(folder_problems(key, name, ()))
        if not found and not Path(name).expanduser().is_dir() and (problem := hub.problem("model", name)):
            found = [Problem(key, f"{name!r} is {problem}")]
        yield from found


def _exported(run_dir: Path) -> str:
    """The models that a run directory holds, in words."""
    found = [path.parent for path in run_dir.glob("checkpoints/step_*/hf*/config.json")]
    newest = max((int(path.parent.name.removeprefix("step_")) for path in found), default=None)
    of_newest = sorted(str(path) for path in found if path.parent.name == f"step_{newest}")
    return f"name a model of it: {_listed(of_newest)}" if of_newest else "it has no checkpoint with a model yet"


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "nothing"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _unreadable(key: str, path: Path) -> Iterator[Problem]:
    try:
        is_object = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        reason = "" if is_object else "it does not hold a JSON object"
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason:
        yield Problem(key, f"{path} is not a valid Hugging Face config: {reason}; save the model again")
