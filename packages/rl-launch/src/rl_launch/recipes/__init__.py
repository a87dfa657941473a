"""Recipes that come with this package, one YAML file each."""

from pathlib import Path

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """Their names, as `rl train` takes them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
