"""Recipes that come with this package, one YAML file each."""

from pathlib import Path

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """Their names, as `rl train` takes them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def source_name(source: str) -> str:
    """Return the name of a recipe, or of a file or folder in its place, without the ending of YAML files.

    Other dots belong to the name, as in `deepscaler-1.5b-8k`.
    """
    path = Path(source)
    return path.stem if path.suffix in (".yaml", ".yml") else path.name
