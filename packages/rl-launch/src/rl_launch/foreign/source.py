"""Files of other systems as nested plain values, with the place of each."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_core.config.tree import MAX_DEPTH, TOO_DEEP, BoundedLoader, bounded, parsed, read_text, reason
from rl_core.errors import ConfigError
from rl_launch.foreign.scalars import FLOAT, scalar
from rl_launch.foreign.shell import read_commands

REPLACES = "_override_"
"""A key that has a section of NeMo RL replace the inherited one in place of merging with it."""
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


class _Loader(BoundedLoader):
    """Reads `1e-5` as a number and a date as a string, as OmegaConf and YAML 1.2 do."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^{FLOAT.pattern}$"), list("-+.0123456789"))


def read(path: Path, bases: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The values of a YAML, JSON or TOML file, over those of the files that its `defaults` name.

    Args:
        path: The file.
        bases: Values of files that the system brings along, by name, if they are not beside the file.

    Raises:
        ConfigError: If a file does not exist or cannot be read, or `defaults` form a circle.
    """
    return _merged(path, (), bases or {})


def read_overrides(path: Path, bases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The values of a YAML file, or the `key=value` words of a shell script, as Hydra takes them.

    Args:
        path: The file.
        bases: As `read` takes them.

    Raises:
        ConfigError: If the file cannot be read, or has no such words.
    """
    if path.suffix in (".yaml", ".yml", ".json"):
        return read(path, bases)
    found: dict[str, Any] = {}
    for word in (word for command in read_commands(path) for word in command.words):
        key, equals, value = word.lstrip("+").partition("=")
        if equals and _KEY.fullmatch(key):
            *sections, last = key.split(".")
            at = found
            for name in sections:
                at = at.setdefault(name, {})
                if not isinstance(at, dict):
                    raise ConfigError(f"{path}: {key} is below {name}, which has a value. Remove one of them")
            at[last] = _value(value)
    if not found:
        raise ConfigError(f"{path}: the file contains no `section.key=value` arguments")
    checked: dict[str, Any] = bounded(found, str(path))
    return checked


def _value(text: str) -> Any:
    """The value of a Hydra override: a list in brackets, or a scalar."""
    if text[:1] == "[" and text[-1:] == "]":
        return [scalar(each.strip().strip("'\"")) for each in text[1:-1].split(",") if each.strip()]
    return scalar(text.strip("'\""))


def _merged(path: Path, chain: tuple[Path, ...], bases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if path.resolve() in chain or len(chain) == MAX_DEPTH:
        raise ConfigError(f"{path}: circular `defaults`, or a chain of more than {MAX_DEPTH}. Remove one of them")
    own = _values(path)
    parents = own.pop("defaults", None)
    merged: dict[str, Any] = {}
    for parent in _parents(path, parents):
        file = path.parent / parent
        file = file if file.suffix else file.with_suffix(".yaml")
        if not file.is_file() and parent in bases:
            merged = _over(merged, bases[parent])
            continue
        if not file.is_file():
            raise ConfigError(
                f"{path}: inherits from {parent}, and there is no file {file}; put that file there, or import a file "
                "that inherits from none"
            )
        merged = _over(merged, _merged(file, (*chain, path.resolve()), bases))
    return _without_marks(_over(merged, own))


def _parents(path: Path, named: Any) -> list[str]:
    """File names in `defaults`; `_self_` is the file itself, which always comes last here."""
    several = named if isinstance(named, list) else [] if named is None else [named]
    groups = [each for each in several if not isinstance(each, str)]
    if groups:
        raise ConfigError(
            f"{path}: `defaults` names groups of Hydra ({groups[0]}), whose values are not in the file; import the "
            "whole config, as the script prints it with `--cfg job`"
        )
    return [each for each in several if each != "_self_"]


def _over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)) or above.get(REPLACES):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _over(merged[key], value) if key in merged else value
    return merged


def _without_marks(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_marks(value) for key, value in values.items() if key != REPLACES}


def _values(path: Path) -> dict[str, Any]:
    text = read_text(path, str(path))
    try:
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            values = parsed(text, str(path), lambda: yaml.load(text, _Loader))  # a SafeLoader
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain `key: value` lines")
    checked: dict[str, Any] = bounded(values, str(path))
    return checked
