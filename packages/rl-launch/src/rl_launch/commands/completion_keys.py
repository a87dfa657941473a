"""Keys and their values for completion by the shell, from no more of the schema than they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_core.config import all_keys, explain, load, values_of
from rl_core.plugins import ALGORITHMS, AlgorithmPlugin, plugins
from rl_launch.run_config.reading import read_raw
from rl_launch.run_config.root_types import root_type, type_of

_EVERY = ("algorithm", "run_dir", "policy", "checkpointing", "logger", "cluster")
"""Keys of the root that every algorithm has."""


def keys_of(source: str) -> list[str]:
    """Return the keys of a recipe, a YAML file or a run directory.

    Raises:
        ConfigError: If it cannot be read.
    """
    raw = read_raw(source)
    return list(all_keys(type_of(raw), raw.plain()))


def settable_keys(source: str) -> list[str]:
    """Return the keys of a recipe, a YAML file or a run directory that have no keys below.

    Raises:
        ConfigError: If it cannot be read.
    """
    keys = keys_of(source)
    sections = {key[:end] for key in keys for end, letter in enumerate(key) if letter in ".["}
    return [key for key in keys if key not in sections]


def keys_beginning(incomplete: str) -> list[str]:
    """Return the keys of all installed algorithms that begin with a text; without a dot in it, those of the root."""
    head, dot, _ = incomplete.partition(".")
    algorithms = plugins(ALGORITHMS)
    if not dot:
        heads = dict.fromkeys([*_EVERY, *(head for plugin in algorithms.values() for head in _heads(plugin))])
        return [name for name in heads if name.startswith(incomplete)]
    having = [plugin for plugin in algorithms.values() if head in (*_EVERY, *_heads(plugin))]
    # the keys of a run with rollouts include those of other runs
    if head in _EVERY and (generating := [plugin for plugin in having if plugin.generates]):
        having = generating[:1]
    found = dict.fromkeys(key for plugin in having for key in all_keys(_root(plugin), {}))
    return [key for key in found if key.startswith(incomplete)]


def values_of_key(source: str, key: str) -> tuple[str, ...]:
    """Return the values of a key that its type lists, as they are written; empty if it lists none.

    Raises:
        ConfigError: If the source cannot be read, or has no such key.
    """
    raw = read_raw(source)
    root = type_of(raw)
    return explain(root, key, values_of(raw, root)).choices


def _root(plugin: AlgorithmPlugin) -> Any:
    return root_type(plugin, load({"algorithm": plugin.name}))


def _heads(plugin: AlgorithmPlugin) -> Iterator[str]:
    yield from plugin.sections
    yield from (key.partition(".")[0] for key in plugin.model_keys(lambda _: ()))
    if plugin.generates:
        yield "env"
