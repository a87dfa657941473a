"""Arguments and options of commands, those that several commands share, and the output of `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rl_launch.cli.completion import complete_override, complete_recipe


def argument(metavar: str | None, about: str, complete: Callable[..., list[str]] | None = None) -> Any:
    """Return an argument with its help, and the function that completes it in a shell."""
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete)


def named(metavar: str, about: str) -> Any:
    """Return an argument for a recipe, a file or a run."""
    return argument(metavar, about, complete_recipe)


def keys(about: str, metavar: str = "[KEY=VALUE]...") -> Any:
    """Return an argument for config keys with their values."""
    return argument(metavar, about, complete_override)


def option(names: str, about: str, metavar: str | None = None, **further: Any) -> Any:
    """Return an option with its help, such as `option("--output -o", "The file to write.", "FILE")`."""
    return typer.Option(*names.split(), help=about, metavar=metavar, **further)


Overrides = Annotated[list[str] | None, keys("Config keys to set.")]
AsJson = Annotated[bool, option("--json", "Print one JSON object.")]
Verbose = Annotated[bool, option("--verbose -v", "Print more log messages.")]


def write_json(data: Any) -> None:
    """Print an object, as `--json` does."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
