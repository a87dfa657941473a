"""`rl recipes`, `rl init`, `rl env list` and `rl data list`: the names that a config can use."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_launch.cli import explanation_text
from rl_launch.cli.completion import complete_dataset, complete_environment, complete_recipe, complete_task
from rl_launch.cli.failure import reported
from rl_launch.recipes import recipe_names

if TYPE_CHECKING:
    from rl_launch.commands.catalog import Choice

environments = typer.Typer(no_args_is_help=True)
data = typer.Typer(no_args_is_help=True)


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|WORD]...",
            help="A recipe to print, or words to search for; recipes with all words are listed.",
            autocompletion=complete_recipe,
        ),
    ] = None,
) -> None:
    """List the built-in recipes, or print one."""
    with reported():
        from rl_launch.commands.recipe_files import recipe_text, recipes_with

        match words or []:
            case [name] if name in recipe_names():
                sys.stdout.write(recipe_text(name))
            case given:
                sys.stdout.write(explanation_text.recipes(recipes_with(given)))


def init(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="The recipe to copy.", autocompletion=complete_recipe)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.yaml",
            help="The file to write (default: RECIPE.yaml in the current folder).",
        ),
    ] = None,
) -> None:
    """Copy a recipe to a new file that you can edit and train."""
    with reported():
        from rl_launch.commands.recipe_files import write_recipe

        path = (output or Path(f"{recipe}.yaml")).expanduser()
        write_recipe(recipe, path)
        sys.stdout.write(
            f"Wrote {path}. Change it, then train: rl train {path}\n"
            f"Every key: rl config show {path}; what one means: rl config explain {path} KEY\n"
        )


All = Annotated[bool, typer.Option("--all", help="Show the settings of all entries.")]


@environments.command("list")
def list_environments(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Show only this environment, with its settings.", autocompletion=complete_environment
        ),
    ] = None,
    everything: All = False,
) -> None:
    """List the installed environments. With a name or --all, show their settings, which are set under `env.NAME`."""
    with reported():
        from rl_launch.commands.catalog import chosen, shared_settings
        from rl_launch.commands.catalog import environments as found

        known = found()
        if name is not None:
            one = chosen(known, name, "environment")
            sys.stdout.write(explanation_text.choice(one, "rl env list"))
            return
        if not everything:
            sys.stdout.write(explanation_text.names({each.name: _line(each) for each in known.values()}))
            sys.stdout.write("\nrl env list NAME shows the settings of one, rl env list --all those of all\n")
            return
        shared = shared_settings()
        everywhere = {each.key.rpartition(".")[2] for each in shared}
        for each in known.values():
            own = tuple(setting for setting in each.settings if setting.key.rpartition(".")[2] not in everywhere)
            one = replace(each, settings=own)
            sys.stdout.write(explanation_text.choice(one, "rl env list"))
        sys.stdout.write(explanation_text.settings("settings of every environment", shared))


@data.command("list")
def list_datasets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Show only this dataset, with its settings and tasks.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="Show the settings of this task.", autocompletion=complete_task),
    ] = None,
    everything: All = False,
) -> None:
    """List the installed datasets, and hub datasets that need only a name (`data.train.dataset_name: OWNER/NAME`). With
    a name or --all, show their settings, which are set under `data.train.settings`.

    For files (`data.train.data_path`) and other hub datasets, set their columns with keys of `data.train`.
    """
    with reported():
        from rl_launch.commands.catalog import chosen
        from rl_launch.commands.catalog import datasets as found
        from rl_launch.commands.catalog import hub_datasets as on_hub

        known, hub = found(), on_hub()
        if name is None and not everything:
            sys.stdout.write("installed:\n")
            sys.stdout.write(explanation_text.names({each.name: _line(each) for each in known.values()}, "  "))
            sys.stdout.write("\non the hub:\n")
            sys.stdout.write(explanation_text.names({each: about[0] for each, about in hub.items()}, "  "))
            sys.stdout.write("\nrl data list NAME shows the settings of one, rl data list --all those of all\n")
            return
        if name is None:
            for each in known.values():
                sys.stdout.write(explanation_text.choice(each, "rl data list"))
            sys.stdout.write(explanation_text.hub_datasets(hub))
            return
        if name in hub:
            sys.stdout.write(explanation_text.hub_datasets({name: hub[name]}))
            return
        each = chosen({**known, **hub}, name, "dataset")
        if task is not None:
            sys.stdout.write(explanation_text.task(chosen(each.tasks or {}, task, f"task of {name}")))
            return
        sys.stdout.write(explanation_text.choice(each, "rl data list"))
        if each.tasks:
            sys.stdout.write(explanation_text.tasks(each.tasks.values()))


def _line(each: Choice) -> str:
    """Return an environment or dataset as one line."""
    return f"(not installed) {each.doc}" if each.missing else each.doc
