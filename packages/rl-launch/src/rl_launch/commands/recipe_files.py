"""Recipes as files: their text, those that match words, and a copy for a user to start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.config import did_you_mean
from rl_core.errors import ConfigError
from rl_launch.commands.catalog import Recipe, recipes
from rl_launch.recipes import RECIPES, recipe_names
from rl_launch.run_config.reading import read_raw


def recipe_text(name: str) -> str:
    """Return the YAML of a recipe, as its file has it.

    Raises:
        ConfigError: If there is no such recipe, naming the nearest.
    """
    if name not in recipe_names():
        raise ConfigError(
            f"there is no recipe {name!r}{did_you_mean(name, recipe_names())}; use rl recipes to list all "
            "recipes, and rl recipes WORD to search for a word"
        )
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def recipes_with(words: Sequence[str]) -> list[Recipe]:
    """Return the recipes that have all words in name, algorithm or summary, regardless of case.

    Raises:
        ConfigError: If there are none.
    """
    wanted = [word.lower() for word in words]
    found = [
        recipe
        for recipe in recipes()
        if all(word in f"{recipe.name} {recipe.algorithm} {recipe.summary}".lower() for word in wanted)
    ]
    if not found:
        text = " ".join(words)
        near = did_you_mean(text, recipe_names())
        raise ConfigError(f"no recipe mentions {text!r}{near}; use rl recipes to list all of them")
    return found


def write_recipe(name: str, output: Path) -> None:
    """Write a copy of a recipe for a user to change.

    Raises:
        ConfigError: If there is no such recipe, or the file cannot be written, exists, or would inherit from itself.
    """
    text = recipe_text(name)
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a recipe's file ends in .yaml, such as {output.name}.yaml")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} already exists. Choose another file: rl init {name} --output FILE.yaml") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    try:
        read_raw(output)
    except ConfigError as error:
        # a recipe that is inherited from is looked for beside the file first
        output.unlink()
        raise ConfigError(f"{output} cannot be a copy of {name}: {error}. Choose another file with --output") from None
