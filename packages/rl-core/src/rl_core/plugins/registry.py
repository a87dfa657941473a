"""Plugins by name: those of installed packages, and algorithms in files of users."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.exports import public_alternatives
from rl_core.plugins.algorithm import Algorithm
from rl_core.plugins.declarations import ALGORITHMS, KINDS, AlgorithmPlugin
from rl_core.plugins.user_code import FromFile, beside, is_in_file, load_module


@cache
def _entries(group: str) -> Mapping[str, EntryPoint]:
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        known = entries.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise ConfigError(
                f"two installed packages offer the {group} plugin {entry.name!r}: {known.value} and {entry.value}; "
                "uninstall one"
            )
    return entries


def names(group: str) -> list[str]:
    """Installed plugins of a group, sorted; imports none of them."""
    return sorted(_entries(group))


def plugin(group: str, name: str) -> Any:
    """The plugin object of a group by name.

    Raises:
        ConfigError: If no installed package offers it; the message names the nearest and all that are installed.
    """
    found = _entries(group).get(name)
    if found is None:
        near = difflib.get_close_matches(name, names(group), n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(
            f"there is no {KINDS[group]} {name!r}{hint} installed are {', '.join(names(group)) or 'none'}"
        )
    return found.load()


def algorithm_named(name: str) -> AlgorithmPlugin:
    """The algorithm of that name: an installed plugin, or one in a file of the user's own, as `file.py:NAME`. The
    class of such a plugin may be in a file as well (`implementation="file.py:Class"`), found from the folder of the
    plugin's.

    Raises:
        ConfigError: If there is no such plugin.
    """
    if is_in_file(name):
        return _algorithm_in_file(name)
    found: AlgorithmPlugin = plugin(ALGORITHMS, name)
    return found


@cache
def _algorithm_in_file(name: str) -> AlgorithmPlugin:
    try:
        FromFile.read(name)  # says what the file defines in the place of a wrong name
        found = resolve(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(found, AlgorithmPlugin):
        raise ConfigError(f"{name} must be an rl_core.AlgorithmPlugin, got {type(found).__name__}")
    folder = Path(name.rpartition(":")[0]).parent
    return replace(found, implementation=beside(found.implementation, folder))


def implementation_of(algorithm: AlgorithmPlugin) -> Algorithm[Any, Any, Any]:
    """Import and make what an algorithm's plugin names.

    Raises:
        ConfigError: If there is no such class, or it is not an `Algorithm`.
    """
    try:
        found = resolve(algorithm.implementation)
    except ValueError as error:
        raise ConfigError(f"algorithm: implementation of {algorithm.name}: {error}") from None
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise ConfigError(
            f"algorithm: implementation of {algorithm.name}: {algorithm.implementation} must be a subclass of "
            "rl_core.Algorithm"
        )
    made: Algorithm[Any, Any, Any] = found()
    return made


def plugin_packages() -> list[str]:
    """Top-level packages that offer plugins, sorted; imports none of them."""
    return sorted({entry.module.partition(".")[0] for group in KINDS for entry in entry_points(group=group)})


def plugins(group: str) -> dict[str, Any]:
    """All installed plugins of a group by name."""
    return {name: plugin(group, name) for name in names(group)}


def resolve(path: str) -> Any:
    """Return the object at `"package.module:Name"`, or at `"file.py:Name"` in a user's file.

    Raises:
        ValueError: If the text is not of that form, the module has no such name, or the file cannot be read or run.
        ModuleNotFoundError: If the module, or something it imports, is not installed.
    """
    module, _, attribute = path.rpartition(":")
    if not module or not attribute:
        raise ValueError(f"expected 'package.module:Name' or 'file.py:Name', got {path!r}")
    try:
        target: Any = load_module(module)
    except ModuleNotFoundError as error:
        if hint := _public_instead(module, attribute):
            raise ModuleNotFoundError(f"{error}{hint}", name=error.name) from error
        raise
    try:
        for part in attribute.split("."):
            target = getattr(target, part)
    except AttributeError:
        raise ValueError(f"{module!r} has no {attribute!r}{_public_instead(module, attribute)}") from None
    return target


def _public_instead(module: str, attribute: str) -> str:
    alternatives = public_alternatives(module, attribute.partition(".")[0])
    return f"; use {' or '.join(alternatives)}" if alternatives else ""
