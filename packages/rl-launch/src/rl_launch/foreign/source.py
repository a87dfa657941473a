"""Files of other systems as nested plain values, with the place of each."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_core.errors import ConfigError

REPLACES = "_override_"
"""A key that has a section of NeMo RL replace the inherited one in place of merging with it."""

_FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_INTEGER = re.compile(r"[-+]?\d+")
_VARIABLE = re.compile(r"\$\{oc\.env:[^${}]*\}")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right if left % right else left // right,
    "max": max,
    "min": min,
}
"""Resolvers of interpolations that recipes of NeMo RL and verl compute with."""


class _Loader(yaml.SafeLoader):
    """Reads `1e-5` as a number, as OmegaConf and YAML 1.2 do."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^{_FLOAT.pattern}$"), list("-+.0123456789"))


def read(path: Path) -> dict[str, Any]:
    """The values of a YAML, JSON or TOML file, over those of the files that its `defaults` name.

    Raises:
        ConfigError: If a file does not exist or cannot be read, or `defaults` form a circle.
    """
    return _merged(path, ())


def read_flags(path: Path) -> dict[str, Any]:
    """The flags of a shell script (`--name value`, `--name=value`, `--switch`), or the values of a YAML or JSON file.

    Raises:
        ConfigError: If the file cannot be read, or has no flags.
    """
    if path.suffix in (".yaml", ".yml", ".json"):
        return {name.replace("-", "_"): value for name, value in read(path).items()}
    try:
        words = shlex.split(_text(path).replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}: not a shell script that can be read: {error}") from None
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _scalar(value) if equals else True
            name = None if equals else name
        elif name is not None:
            earlier = found[name]
            found[name] = _scalar(word) if earlier is True else [*_several(earlier), _scalar(word)]
    if not found:
        raise ConfigError(f"{path}: there are no flags (--name value) in it")
    return found


def flattened(values: Any, path: str = "") -> dict[str, Any]:
    """The values at the ends of nested mappings by dotted key; a list is one value, and so is an empty mapping."""
    if not isinstance(values, dict) or (not values and path):
        return {path: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flattened(value, f"{path}.{name}" if path else str(name))
    return found


def interpolated(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The values with every interpolation computed, except those of environment variables, which stay as they are.

    Args:
        values: Nested plain values.
        name: Name of the file, for messages.

    Raises:
        ConfigError: Listing every interpolation that cannot be computed.
    """
    variables: list[str] = []

    def hidden(value: Any) -> Any:
        """Put a mark in the place of each variable: its value belongs to the machine, not to the recipe."""
        match value:
            case dict():
                return {key: hidden(item) for key, item in value.items()}
            case list():
                return [hidden(item) for item in value]
            case str():
                return _VARIABLE.sub(lambda found: _mark(variables, found[0]), value)
            case _:
                return value

    def shown(value: Any) -> Any:
        match value:
            case dict():
                return {key: shown(item) for key, item in value.items()}
            case list():
                return [shown(item) for item in value]
            case str():
                return re.sub(r"\x00(\d+)\x00", lambda found: variables[int(found[1])], value)
            case _:
                return value

    problems: list[str] = []
    with _resolvers():
        container = OmegaConf.create(hidden(values))
        plain = _resolved(container, "", problems)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    result: dict[str, Any] = shown(plain)
    return result


def _mark(variables: list[str], text: str) -> str:
    variables.append(text)
    return f"\x00{len(variables) - 1}\x00"


def _resolved(container: Any, path: str, problems: list[str]) -> Any:
    if OmegaConf.is_dict(container):
        items = [(str(key), key) for key in container]
        return {key: _at(container, key, f"{path}.{name}" if path else name, problems) for name, key in items}
    if OmegaConf.is_list(container):
        return [_at(container, index, f"{path}[{index}]", problems) for index in range(len(container))]
    return container


def _at(container: Any, key: Any, path: str, problems: list[str]) -> Any:
    try:
        value = container[key]
    except (OmegaConfBaseException, ArithmeticError, TypeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        problems.append(f"{path}: the interpolation cannot be computed: {reason}")
        return None
    return _resolved(value, path, problems)


@contextmanager
def _resolvers() -> Iterator[None]:
    """Have OmegaConf compute; its resolvers are of the whole process, so they are removed again."""
    added = [name for name in _ARITHMETIC if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, _ARITHMETIC[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def _merged(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in chain:
        raise ConfigError(f"{path}: `defaults` go in a circle; take one of them out")
    own = _values(path)
    parents = own.pop("defaults", None)
    merged: dict[str, Any] = {}
    for parent in _parents(parents):
        file = path.parent / parent
        file = file if file.suffix else file.with_suffix(".yaml")
        if not file.is_file():
            raise ConfigError(
                f"{path}: inherits from {parent}, and there is no file {file}; put that file there, or import a file "
                "that inherits from none"
            )
        merged = _over(merged, _merged(file, (*chain, path.resolve())))
    return _without_marks(_over(merged, own))


def _parents(named: Any) -> list[str]:
    """File names in `defaults`; Hydra's `_self_` and groups of its own packages name none."""
    several = named if isinstance(named, list) else [] if named is None else [named]
    return [each for each in several if isinstance(each, str) and each != "_self_"]


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
    text = _text(path)
    try:
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            values = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _scalar(text: str) -> Any:
    """The number, truth value or null that a word of a command line is, else the word."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
