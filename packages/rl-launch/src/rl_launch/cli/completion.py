"""Completion by the shell: recipes, keys and values.

Each function imports its modules when it runs, and none imports an engine: a user waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import typer

from rl_launch.recipes import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes that begin with this text; the shell adds files itself."""
    return _beginning(recipe_names(), incomplete)


def complete_rows(incomplete: str) -> list[str]:
    """Return the recipes and datasets that begin with this text; the shell adds files itself."""
    return [*complete_recipe(incomplete), *complete_dataset(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    """Return the installed algorithms that begin with this text."""
    from rl_core.plugins import ALGORITHMS, names

    return _beginning(names(ALGORITHMS), incomplete)


def complete_environment(incomplete: str) -> list[str]:
    """Return the installed environments that begin with this text."""
    from rl_core.plugins import ENVIRONMENTS, names

    return _beginning(names(ENVIRONMENTS), incomplete)


def complete_dataset(incomplete: str) -> list[str]:
    """Return the installed datasets, and the hub datasets that need only a name, that begin with this text."""
    from rl_algos.data.sources.hub_datasets import DATASETS as ON_HUB
    from rl_algos.data.sources.hub_datasets import PREFERENCES
    from rl_core.plugins import DATASETS, names

    return _beginning(dict.fromkeys([*names(DATASETS), *ON_HUB, *PREFERENCES]), incomplete)


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the tasks of the dataset that was given before."""
    from rl_core.errors import ConfigError
    from rl_core.plugins import DATASETS, names
    from rl_launch.commands.catalog import tasks_of

    dataset = ctx.params.get("name")
    try:
        return _beginning(tasks_of(dataset), incomplete) if dataset in names(DATASETS) else []
    except ConfigError:
        return []


def complete_tasks(incomplete: str) -> list[str]:
    """Return lists of evaluation tasks, joined by commas, whose last one begins as the last one here."""
    from rl_algos.evaluation.tasks import GYM, TASKS
    from rl_core.plugins import DATASETS, names

    before, comma, last = incomplete.rpartition(",")
    if last.startswith(f"{GYM}/") and GYM in names(DATASETS):
        from rl_launch.commands.catalog import tasks_of

        known: Iterable[str] = (f"{GYM}/{task}" for task in tasks_of(GYM))
    else:
        known = [*TASKS, *(f"{GYM}/" if name == GYM else name for name in names(DATASETS))]
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in taken]


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return recipes, and the keys of the recipe that was given before, or otherwise of all algorithms."""
    from rl_core.errors import ConfigError

    given = ctx.params.get("words") or ()
    try:
        if given:
            return _beginning(keys_of(given[0]), incomplete)
        return [*_beginning(recipe_names(), incomplete), *_keys_beginning(incomplete)]
    except ConfigError:
        return []


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return keys of the recipe's config that begin with this text, followed by `=`; after `=`, the values of a key
    that has a few."""
    from rl_core.errors import ConfigError

    recipe = ctx.params.get("recipe")
    if not recipe or "=" in recipe:
        return []
    try:
        match list(ctx.params.get("overrides") or ()):
            # bash breaks words at `=`, so the key and the equals sign are words before the value
            case [*_, key, "="] | [*_, key] if "=" not in key:
                return _beginning(_values_of(recipe, key), incomplete)
        key, equals, value = incomplete.partition("=")
        if equals:
            return [f"{key}={each}" for each in _beginning(_values_of(recipe, key), value)]
        keys = keys_of(recipe)
        sections = {key[:end] for key in keys for end, letter in enumerate(key) if letter in ".["}
        return [f"{key}=" for key in _beginning(keys, incomplete) if key not in sections]
    except ConfigError:
        return []


def keys_of(source: str) -> list[str]:
    """Return the keys of a recipe, a YAML file or a run directory.

    Raises:
        ConfigError: If it cannot be read.
    """
    from rl_core.config import all_keys
    from rl_launch.run_config.reading import read_raw
    from rl_launch.run_config.root_types import type_of

    raw = read_raw(source)
    return list(all_keys(type_of(raw), raw.plain()))


def _values_of(source: str, key: str) -> tuple[str, ...]:
    """Return the values of a key that its type lists, as they are written; empty if it lists none."""
    from rl_core.config import explain, values_of
    from rl_launch.run_config.reading import read_raw
    from rl_launch.run_config.root_types import type_of

    raw = read_raw(source)
    root = type_of(raw)
    return explain(root, key, values_of(raw, root)).choices


def _keys_beginning(incomplete: str) -> list[str]:
    """Return the keys of all installed algorithms that begin with a string, or of the root without a dot in it."""
    from rl_core.config import all_keys, load
    from rl_core.plugins import ALGORITHMS, plugins
    from rl_launch.run_config.root_types import root_type

    # keys of the root that every algorithm has
    every = ("algorithm", "run_dir", "policy", "checkpointing", "logger", "cluster")
    algorithms = plugins(ALGORITHMS)
    heads = {name: plugin.root_keys for name, plugin in algorithms.items()}
    head, dot, _ = incomplete.partition(".")
    if not dot:
        return _beginning(dict.fromkeys([*every, *(each for own in heads.values() for each in own)]), incomplete)
    having = [algorithms[name] for name, own in heads.items() if head in (*every, *own)]
    # a run with rollouts has the keys of other runs as well
    if head in every and (generating := [plugin for plugin in having if plugin.generates]):
        having = generating[:1]
    roots = [root_type(plugin, load({"algorithm": plugin.name})) for plugin in having]
    return _beginning(dict.fromkeys(key for root in roots for key in all_keys(root, {})), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
