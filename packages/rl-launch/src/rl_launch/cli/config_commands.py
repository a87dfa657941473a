"""`rl config`: the values of a config, their origins, and the differences between two."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_launch.cli.failure import reported

if TYPE_CHECKING:
    from rl_core.config import Explanation

app = typer.Typer(no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE.yaml", help="A recipe's name, a YAML file, or a run directory.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set.")]


@app.command()
def show(recipe: Source, overrides: Overrides = None) -> None:
    """Print the whole config of a run, defaults included, as YAML."""
    with reported():
        from rl_core.config import to_yaml
        from rl_launch.root import read_config

        sys.stdout.write(to_yaml(read_config(recipe, overrides or ()).config))


@app.command()
def explain(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE|FILE.yaml]", help="A recipe's name, a YAML file, or a run directory; may be left out."
        ),
    ],
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="A dotted key; the root if left out.")] = "",
    overrides: Overrides = None,
) -> None:
    """Explain a key: meaning, allowed values, and the origin of its value in a recipe (the smallest by default)."""
    with reported():
        from rl_core.config import explain as explained
        from rl_launch.root import read_config, recipe_with

        if not key and (smallest := recipe_with(recipe)):
            recipe, key = smallest, recipe
        resolved = read_config(recipe, overrides or ())
        sys.stdout.write(described(explained(type(resolved.config), key, resolved)))


@app.command()
def diff(
    first: Source,
    second: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml")],
    overrides: Overrides = None,
) -> None:
    """Print the keys in which two configs differ; overrides apply to the second."""
    with reported():
        from rl_core.config import diff as changes
        from rl_launch.root import read_config

        old, new = read_config(first).config, read_config(second, overrides or ()).config
        for change in changes(old, new):
            sys.stdout.write(f"{change}\n")


def described(explanation: Explanation) -> str:
    """An explanation as text, with a line for each key below."""
    lines = [f"{explanation.key or 'config'}: {_short(explanation.value)}  ({explanation.origin})"]
    if explanation.children:
        lines = [explanation.key or "config"]
    if explanation.doc:
        lines.append(f"  {explanation.doc}")
    if not explanation.children:
        lines.append(f"  allowed: {explanation.type}")
        lines.append("  must be set" if explanation.required else f"  default: {_short(explanation.default)}")
    for child in explanation.children:
        summary = " ".join(child.doc.split())
        value = "" if child.type == "section" else f" = {_short(child.value)}  ({child.origin})"
        lines.append(f"  {child.key}{value}" + (f"  {summary}" if summary else ""))
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    from rl_core.config import show as shown

    return shown(value)
