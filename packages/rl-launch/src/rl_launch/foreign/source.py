"""Files of other systems as nested plain values, with their interpolations computed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from rl_core.config.load import interpolate
from rl_core.config.tree import (
    MAX_DEPTH,
    MAX_DIGITS,
    TOO_DEEP,
    BoundedLoader,
    bounded,
    format_path,
    leaves,
    mapped,
    parsed,
    read_text,
    reason,
)
from rl_core.errors import ConfigError

REPLACES = "_override_"
"""A key that has a section of NeMo RL replace the inherited one in place of merging with it."""

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right if left % right else left // right,
    "max": max,
    "min": min,
}
"""Resolvers that other systems register with OmegaConf, in addition to `eval`."""
_PREFIX = "imported."
"""Resolvers are registered under this prefix, because OmegaConf has one set of them for the whole process."""
_REGISTERED = re.compile(r"\$\{(?=(?:oc\.env|eval|" + "|".join(_ARITHMETIC) + "):)")


class _Loader(BoundedLoader):
    """Reads `1e-5` as a number and a date as a string, as OmegaConf and YAML 1.2 do."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_FLOAT = re.compile(r"^[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a YAML, JSON or TOML file, over the values of the files in its `defaults`.

    Args:
        path: The file.
        chain: Files whose `defaults` lead to it.

    Raises:
        ConfigError: If a file does not exist or cannot be read, or `defaults` form a circle.
    """
    if path.resolve() in chain or len(chain) == MAX_DEPTH:
        raise ConfigError(f"{path}: circular `defaults`, or a chain of more than {MAX_DEPTH}. Remove one of them")
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
    own = checked
    named = own.pop("defaults", None)
    merged: dict[str, Any] = {}
    for parent in named if isinstance(named, list) else [] if named is None else [named]:
        if not isinstance(parent, str):
            raise ConfigError(
                f"{path}: `defaults` names groups of Hydra ({parent}), whose values are not in the file; import the "
                "whole config, as the script prints it with `--cfg job`"
            )
        if parent == "_self_":  # the file itself always comes last here
            continue
        file = path.parent / parent
        file = file if file.suffix else file.with_suffix(".yaml")
        if not file.is_file():
            raise ConfigError(
                f"{path}: inherits from {parent}, and there is no file {file}; put that file there, or import a file "
                "that inherits from none"
            )
        merged = _over(merged, read(file, (*chain, path.resolve())))
    found: dict[str, Any] = _without_marks(_over(merged, own))
    return found


def interpolated(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values with every interpolation computed by OmegaConf. Interpolations of environment variables are
    kept, because they belong to the machine and not to the recipe.

    Args:
        values: Nested plain values.
        name: Name of the file, for messages.

    Raises:
        ConfigError: If interpolations cannot be computed; lists all of them.
    """
    _register()
    prefix = f"${{{_PREFIX}"
    tree = mapped(values, lambda _, value: _REGISTERED.sub(prefix, value) if isinstance(value, str) else value)
    # OmegaConf's parser calls itself for each level of a string
    deep = [path for path, value in leaves(tree).items() if isinstance(value, str) and value.count("${") > MAX_DEPTH]
    if deep:
        raise ConfigError(f"{name}: {format_path(deep[0])}: has too many interpolations. Write the value instead")
    found, problems = interpolate(tree, tree)
    if problems:
        lines = [f"{name}: {format_path(path)}: {text}" for path, text in problems.items()]
        raise ConfigError("\n".join(lines).replace(prefix, "${"))
    return found


@cache
def _register() -> None:
    from omegaconf import OmegaConf  # its grammar takes 60 ms to import

    def arithmetic(compute: Callable[..., Any], *values: Any) -> Any:
        if not all(isinstance(value, int | float) for value in values):
            raise TypeError("only numbers can be computed with. Write the value instead")
        result = compute(*values)
        if isinstance(result, int) and abs(result) >= 10**MAX_DIGITS:
            raise OverflowError("the result has too many digits. Write the value instead")
        return result

    for name, compute in _ARITHMETIC.items():
        OmegaConf.register_resolver(_PREFIX + name, partial(arithmetic, compute))
    OmegaConf.register_resolver(f"{_PREFIX}eval", lambda value: value)

    def variable(name: Any, *default: Any) -> str:
        return f"${{oc.env:{','.join([str(name), *map(_argument, default)])}}}"

    OmegaConf.register_resolver(f"{_PREFIX}oc.env", variable)


def _argument(value: Any) -> str:
    """Return an argument of an interpolation as it is written: in quotes unless it is a plain word or a number."""
    if value is None:
        return "null"
    text = str(value)
    is_plain = re.fullmatch(r"[\w./~+-]+", text) and text.lower() != "null"
    return text if is_plain else "'" + text.replace("'", r"\'") + "'"


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
