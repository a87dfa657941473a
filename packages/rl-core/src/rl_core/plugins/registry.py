"""Plugins by name: of installed packages, and algorithms in files of users."""

from __future__ import annotations

import difflib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, PluginError
from rl_core.plugins.declarations import ALGORITHMS, KINDS, TYPES, AlgorithmPlugin, DatasetPlugin
from rl_core.user_code import FromFile, beside, is_in_file, resolve

_log = logging.getLogger(__name__)

SLOW_IMPORT_S = 5.0
"""Seconds until a slow import of a plugin is reported; every command waits for it."""


@cache
def _entries(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of each name; several if several packages offer it."""
    entries: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        alike = entries.setdefault(entry.name, [])
        if entry.value not in [each.value for each in alike]:
            alike.append(entry)
    return entries


def names(group: str) -> list[str]:
    """Return the installed plugins of a group, sorted; imports none of them."""
    return sorted(_entries(group))


def plugin(group: str, name: str) -> Any:
    """Return the plugin object of a group by name.

    Raises:
        ConfigError: If no installed package offers it; the message has the nearest and all that are installed.
        PluginError: If the package that offers it is broken.
    """
    found = _entries(group).get(name)
    if found is None:
        near = difflib.get_close_matches(name, names(group), n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(
            f"there is no {KINDS[group]} {name!r}{hint} installed are {', '.join(names(group)) or 'none'}"
        )
    if len(found) > 1:
        raise PluginError(
            f"two installed packages offer the {group} plugin {name!r}: {found[0].value} and {found[1].value}; "
            "uninstall one"
        )
    return _load(found[0])


def _load(entry: EntryPoint) -> Any:
    began = time.monotonic()
    try:
        # the output of a command may be read by a program, so a module that prints must not add to it
        with redirect_stdout(sys.stderr):
            found = entry.load()
    except (Exception, SystemExit) as error:
        # The first line of the reason is enough: users have no use for the traceback of another's package.
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise PluginError(f"{_described(entry)} cannot be loaded: {reason}: uninstall or repair it") from error
    if (took := time.monotonic() - began) > SLOW_IMPORT_S:
        _log.warning(
            "%s took %.0f s to import, and every command waits for it: import large libraries in functions",
            _described(entry),
            took,
        )
    if problem := _problem(entry, found):
        raise PluginError(f"{_described(entry)} cannot be loaded: {entry.value} {problem}: uninstall or repair it")
    return found


def _problem(entry: EntryPoint, found: Any) -> str:
    """Return why an object is not the plugin that its entry point promises; empty if it is."""
    # an environment's process imports this module, and loads no plugin
    from pydantic import BaseModel

    kind = TYPES[entry.group]
    if not isinstance(found, kind):
        return f"must be an rl_core.plugins.{kind.__name__}, got {type(found).__name__}"
    if found.name != entry.name:
        return f"has the name {found.name!r}, which must be the name of the entry point"
    config = found.settings if isinstance(found, DatasetPlugin) else getattr(found, "config", None)
    if config is not None and not (isinstance(config, type) and issubclass(config, BaseModel)):
        return f"must have a subclass of rl_core.config.Config for its settings, got {config!r}"
    return ""


def _described(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"entry point {entry.name} ({entry.group}){package}"


@cache
def plugins(group: str) -> Mapping[str, Any]:
    """Return the plugins of a group that load, by name; a warning has the ones that do not, which cannot be chosen."""
    found = {}
    for name in names(group):
        try:
            found[name] = plugin(group, name)
        except PluginError as error:
            _log.warning("%s", error)
    return found


def load_problem(group: str, name: str) -> str:
    """Return why the installed plugin of this name cannot be used; empty if it can, or is not installed."""
    try:
        plugin(group, name)
    except PluginError as error:
        return str(error)
    except ConfigError:
        pass
    return ""


def algorithm_named(name: str) -> AlgorithmPlugin:
    """Return the algorithm of that name: an installed plugin, or one in a file of the user's own, as `file.py:NAME`.
    The class of such a plugin may be in a file as well (`implementation="file.py:Class"`), found from the folder of the
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
        FromFile.read(name)  # Its error lists what the file defines.
        found = resolve(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(found, AlgorithmPlugin):
        raise ConfigError(f"{name} must be an rl_core.AlgorithmPlugin, got {type(found).__name__}")
    folder = Path(name.rpartition(":")[0]).parent
    return replace(found, implementation=beside(found.implementation, folder))


def plugin_packages() -> list[str]:
    """Top-level packages that offer plugins, sorted; imports none of them."""
    return sorted(
        {entry.value.partition(":")[0].partition(".")[0] for group in KINDS for entry in entry_points(group=group)}
    )
