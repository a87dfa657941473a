"""Completion by the shell: names, keys and values of keys.

Each function imports its modules when it runs, and none imports an engine: a user waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer

from rl_launch.recipes import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that begin with this text; the shell adds files itself."""
    return _beginning(recipe_names(), incomplete)


def complete_rows(incomplete: str) -> list[str]:
    """Recipes and datasets that begin with this text; the shell adds files itself."""
    return [*complete_recipe(incomplete), *complete_dataset(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    """Installed algorithms that begin with this text."""
    from rl_core.plugins import ALGORITHMS, names

    return _beginning(names(ALGORITHMS), incomplete)


def complete_environment(incomplete: str) -> list[str]:
    """Installed environments that begin with this text."""
    from rl_core.plugins import ENVIRONMENTS, names

    return _beginning(names(ENVIRONMENTS), incomplete)


def complete_dataset(incomplete: str) -> list[str]:
    """Installed datasets, and those of the hub whose name is enough, that begin with this text."""
    from rl_algos.data.hub_datasets import DATASETS as ON_HUB
    from rl_algos.data.hub_datasets import PREFERENCES
    from rl_core.plugins import DATASETS, names

    return _beginning(dict.fromkeys([*names(DATASETS), *ON_HUB, *PREFERENCES]), incomplete)


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Tasks of the dataset that was named before."""
    from rl_core.errors import ConfigError
    from rl_core.plugins import DATASETS, names
    from rl_launch.commands.catalog import tasks_of

    dataset = ctx.params.get("name")
    if dataset not in names(DATASETS):
        return []
    try:
        return _beginning(tasks_of(dataset), incomplete)
    except ConfigError:
        return []


def complete_tasks(incomplete: str) -> list[str]:
    """Lists of evaluation tasks, joined by commas, whose last one begins as the last one here."""
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
    """Recipes, and keys: of the recipe that was named before, or else of all algorithms."""
    from rl_core.errors import ConfigError
    from rl_launch.commands.completion_keys import keys_beginning, keys_of

    given = ctx.params.get("words") or ()
    try:
        if given:
            return _beginning(keys_of(given[0]), incomplete)
        return [*_beginning(recipe_names(), incomplete), *keys_beginning(incomplete)]
    except ConfigError:
        return []


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe's config that begin with this text, with `=` after them; after `=`, the values of a key that
    has a few."""
    from rl_core.errors import ConfigError
    from rl_launch.commands.completion_keys import settable_keys, values_of_key

    recipe = ctx.params.get("recipe")
    if not recipe or "=" in recipe:
        return []
    try:
        key = _pending_key(ctx.params.get("overrides") or ())
        if key is not None:  # bash breaks words at `=`
            return _beginning(values_of_key(recipe, key), incomplete)
        key, equals, value = incomplete.partition("=")
        if equals:
            return [f"{key}={each}" for each in _beginning(values_of_key(recipe, key), value)]
        return [f"{key}=" for key in _beginning(settable_keys(recipe), incomplete)]
    except ConfigError:
        return []


def _pending_key(words: Sequence[str]) -> str | None:
    """The key whose value is being typed, if the shell has split `key=value` into three words; None otherwise."""
    match list(words):
        case [*_, key, "="] if "=" not in key:
            return key
        case [*_, key] if "=" not in key:
            return key
    return None


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
