"""Arguments and options that several commands share, and the output of `--json`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from rl_launch.cli.completion import complete_override, complete_recipe


def named(metavar: str, about: str) -> Any:
    """Return an argument for a recipe, a file or a run."""
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete_recipe)


def keys(about: str, metavar: str = "[KEY=VALUE]...") -> Any:
    """Return an argument for config keys with their values."""
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete_override)


Overrides = Annotated[list[str] | None, keys("Config keys to set.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more log messages.")]


def write_json(data: Any) -> None:
    """Print an object, as `--json` does."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
