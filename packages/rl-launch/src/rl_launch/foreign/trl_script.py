"""What a Python script gives TRL's trainers, as far as it is written as constants. The script is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError

_ALGORITHMS = {"GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo", "KTOConfig": "dpo", "RewardConfig": "rm"}
"""By TRL's class of arguments."""
_OF_ADAPTERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "use_rslora": "use_rslora",
}
"""Arguments of peft's `LoraConfig` by the names that TRL's command line has for them."""


_FILE_FORMATS = ("csv", "json", "parquet")
"""Formats that `load_dataset` reads from `data_files`."""


@dataclass(frozen=True)
class Script:
    """The arguments of a script.

    Args:
        algorithm: Name of the algorithm that its class of arguments is for.
        values: Arguments by the names that TRL's command line has for them.
        unread: Arguments that are computed, each with its line.
    """

    algorithm: str
    values: dict[str, Any]
    unread: Mapping[str, int]


def read_script(path: Path) -> Script:
    """Read the arguments of a script.

    Raises:
        ConfigError: If it cannot be read, or constructs none or several of TRL's classes of arguments.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [call for call in calls if _name(call) in _ALGORITHMS]
    if len(found) != 1:
        named = ", ".join(f"{_name(call)} in line {call.lineno}" for call in found) or "none"
        raise ConfigError(
            f"{path}: a script is imported by the one call of {', '.join(_ALGORITHMS)} in it; found {named}. Write its "
            "arguments into a YAML file, and import that"
        )
    [config] = found
    constants = dict(_constants(tree))
    values: dict[str, Any] = {}
    unread: dict[str, int] = {}
    for key, node in _arguments(config, "output_dir"):
        _take(key, node, constants, values, unread)
    if _name(config) == "KTOConfig":
        values.setdefault("loss_type", "kto")
    for call in calls:
        match _name(call):
            case name if name.endswith("Trainer"):
                given = dict(_arguments(call, "model"))
                if "model" in given:
                    _take("model_name_or_path", given["model"], constants, values, unread)
            case "LoraConfig":
                values["use_peft"] = True
                for key, node in _arguments(call):
                    if key in _OF_ADAPTERS:
                        _take(_OF_ADAPTERS[key], node, constants, values, unread)
            case "load_dataset" if "dataset_name" not in values:
                _take_dataset(call, constants, values, unread)
    return Script(_ALGORITHMS[_name(config)], values, unread)


def _take_dataset(call: ast.Call, constants: Mapping[str, Any], values: dict[str, Any], unread: dict[str, int]) -> None:
    given = dict(_arguments(call, "path", "name"))
    path = given.get("path")
    if isinstance(path, ast.Constant) and path.value in _FILE_FORMATS and "data_files" in given:
        # the first argument is a format, not a dataset of the hub
        _take("dataset_name", given["data_files"], constants, values, unread)
        return
    for key, name in (("path", "dataset_name"), ("name", "dataset_config"), ("split", "dataset_train_split")):
        if key in given:
            _take(name, given[key], constants, values, unread)


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _arguments(call: ast.Call, *positions: str) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positions, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that the script sets to a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    yield name, ast.literal_eval(value)
                except ValueError:
                    continue


def _take(
    key: str, node: ast.expr, constants: Mapping[str, Any], values: dict[str, Any], unread: dict[str, int]
) -> None:
    if isinstance(node, ast.Name) and node.id in constants:
        values[key] = constants[node.id]
        return
    try:
        values[key] = ast.literal_eval(node)
    except ValueError:
        unread[key] = node.lineno
