"""Completion of recipes and keys by the shell."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from rl_launch.recipes import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that begin with this text; the shell adds files itself."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_override(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Keys of the recipe's config that begin with this text, with `=` after them."""
    # the schema takes half a second to put together, which only a completion of keys waits for
    from rl_core.config import all_keys
    from rl_core.errors import ConfigError
    from rl_launch.root import read_raw, type_of

    recipe = ctx.params.get("recipe")
    if not recipe or "=" in incomplete:
        return []
    try:
        root = type_of(read_raw(recipe))
    except ConfigError:
        return []
    keys = list(all_keys(root, {}))
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    return [f"{key}=" for key in leaves if key.startswith(incomplete)]
