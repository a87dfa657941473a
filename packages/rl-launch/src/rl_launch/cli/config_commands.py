"""`rl config`: the values of a config, their meaning and origins, differences of two configs, and a JSON Schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli import explanation_text
from rl_launch.cli.completion import complete_key, complete_recipe
from rl_launch.cli.failure import reported
from rl_launch.cli.options import Overrides, argument, named, option

app = typer.Typer(no_args_is_help=True)

Source = Annotated[str, named("RECIPE|FILE.yaml", "Name of a recipe, a YAML file, or a run directory.")]


@app.command()
def show(
    recipe: Source,
    overrides: Overrides = None,
    changed: Annotated[bool, option("--changed", "Print only keys that differ from their defaults.")] = False,
) -> None:
    """Print the whole config of a run as YAML, including defaults."""
    with reported():
        from rl_core.config import as_written, changed_as_written, tree_to_yaml
        from rl_launch.run_config.reading import read_plan

        plan = read_plan(recipe, overrides or ())
        tree = changed_as_written(plan.root) if changed else as_written(plan.root)
        sys.stdout.write(tree_to_yaml(plan.without_unused(tree)))


@app.command()
def explain(
    words: Annotated[
        list[str] | None,
        argument(
            "[RECIPE|FILE.yaml] [KEY|NAME] [KEY=VALUE]...",
            "A dotted key, or a name to search for, such as temperature (default: the sections). After a recipe's "
            "name, a YAML file or a run directory, values there are shown too.",
            complete_key,
        ),
    ] = None,
    searches: Annotated[
        bool, option("--search -s", "Search for keys with all these words in their name or description.")
    ] = False,
) -> None:
    """Explain a key: its meaning, allowed values and default. With a recipe, also its value and where it was set.

    If the name is not a key, the names and descriptions of all keys are searched. For a key of NeMo RL, TRL, verl,
    OpenRLHF or prime-rl, the matching key of this project is shown.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.commands.explain import (
            explain_anywhere,
            explain_destinations,
            explain_in,
            foreign_meanings,
            guide_about,
            names_config,
            search,
        )

        overrides = [word for word in words or () if "=" in word]
        names = [word for word in words or () if "=" not in word]
        source = names.pop(0) if names and (names_config(names[0]) or (len(names) == 2 and not searches)) else ""
        if len(names) > 1 and not searches:
            raise ConfigError(
                f"got {len(names)} keys; write rl config explain RECIPE KEY, or to search for words: "
                f"rl config explain --search {' '.join(names)}"
            )
        key = " ".join(names)
        if overrides and not source:
            raise ConfigError(f"{overrides[0]} needs a recipe; write rl config explain RECIPE {key} {overrides[0]}")
        problems = ""
        try:
            if searches:
                raise ConfigError(f"no key has {key!r} in its name or description")
            found, problems = explain_in(source, key, overrides) if source else (explain_anywhere(key), "")
            sys.stdout.write("\n".join(map(explanation_text.explained, found)))
        except ConfigError as error:
            guide = guide_about(key)
            best, others = search(key, source, overrides) if key and "." not in key else ([], [])
            is_own = any(each.leaf == key for each in best)
            elsewhere = [] if searches or not key or is_own else foreign_meanings(key, source)
            for meaning in elsewhere:
                sys.stdout.write(f"{meaning.text}\n")
            if best:
                sys.stdout.write(explanation_text.found_keys(key, best, others))
            elif elsewhere:
                for each in explain_destinations(elsewhere):
                    sys.stdout.write(f"\n{explanation_text.explained(each)}")
            else:
                ended = str(error) if str(error).endswith("?") else f"{error}."
                raise ConfigError(f"{ended} See {guide}" if guide else str(error)) from None
            if guide:
                sys.stdout.write(f"guide: {guide}\n")
        if problems:
            sys.stderr.write(f"note: rl train would refuse this config: {problems}\n")


@app.command("import")
def import_foreign(
    file: Annotated[Path, argument("FILE", "The config: YAML, JSON, a shell script, or a Python script of TRL.")],
    system: Annotated[str, option("--from", "nemo-rl or trl.", "SYSTEM")],
    output: Annotated[Path | None, option("--output -o", "Write the recipe to this file.", "FILE")] = None,
    keep_going: Annotated[bool, option("--keep-going", "Omit unsupported features and write the rest.")] = False,
    algorithm: Annotated[str, option("--algorithm", "The algorithm, if the file does not contain it.", "NAME")] = "",
    gpus: Annotated[
        int | None, option("--gpus", "Number of GPUs, if the file does not contain it.", "N", min=1)
    ] = None,
) -> None:
    """Import the config, script or command of another system as a recipe, and report the result for each key and line.

    Without --output the recipe is printed. With it, the result for each key is written next to the recipe, to
    FILE.report.txt. A config with unsupported features is refused with a list of all of them, unless you pass
    --keep-going.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.foreign.importing import import_config, recipe_text, refusal_text, report_text, summary_text

        if output is not None and output.expanduser().exists():
            raise ConfigError(f"--output: {output} exists; give another file, or remove it")
        imported = import_config(file.expanduser(), system, algorithm=algorithm, gpus=gpus)
        if imported.features and not keep_going:
            raise ConfigError(refusal_text(imported))
        summary = summary_text(imported)
        if output is None:
            sys.stdout.write(recipe_text(imported))
            # a recipe that is printed can be redirected without the summary
            sys.stderr.write(f"{summary}Pass --output FILE to write the recipe, and the result for each key.\n")
            return
        recipe = output.expanduser()
        report = recipe.with_name(f"{recipe.name}.report.txt")
        try:
            recipe.write_text(recipe_text(imported, report.name), encoding="utf-8")
            report.write_text(report_text(imported), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from None
        sys.stdout.write(f"{summary}Wrote {output}, and the result for each key to {output}.report.txt.\n")


@app.command()
def upgrade(
    file: Annotated[Path, argument("FILE.yaml", "A recipe that was written for an earlier version.")],
    output: Annotated[Path | None, option("--output -o", "Write to this file; it may be the same.", "FILE")] = None,
) -> None:
    """Print a YAML file with the keys of earlier versions under the keys of this version, with the same meaning.

    Sections with such keys are written again, without their comments; the rest of the file stays as it is. The config
    of a run needs no upgrade: commands read it as it is.
    """
    with reported():
        from rl_launch.commands.recipe_files import upgraded_text

        text, keys = upgraded_text(file.expanduser())
        if output is None:
            sys.stdout.write(text)
        else:
            output.expanduser().write_text(text, encoding="utf-8")
        sys.stderr.write(f"{len(keys)} keys of an earlier version{': ' if keys else ''}{', '.join(keys)}\n")


@app.command()
def schema(
    recipe: Annotated[
        str | None,
        argument("[RECIPE|FILE.yaml|ALGORITHM]", "The algorithm, or a recipe with it (default: all algorithms)."),
    ] = None,
    output: Annotated[Path | None, option("--output -o", "Write the schema to this file.", "FILE")] = None,
) -> None:
    """Print a JSON Schema of recipes (draft 2020-12), which editors use to complete and check YAML.

    An editor with the YAML language server uses the schema in the first line of a recipe:
    `# yaml-language-server: $schema=recipe.schema.json`, relative to the recipe.
    """
    with reported():
        from rl_launch.commands.recipe_files import recipe_schema, schema_text, write_schema

        found = recipe_schema(recipe)
        if output is None:
            sys.stdout.write(schema_text(found))
        else:
            hint = write_schema(found, output.expanduser())
            sys.stdout.write(f"Wrote {output}. Recipes in its folder name it in their first line:\n{hint}\n")


@app.command()
def diff(
    first: Source,
    second: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml", autocompletion=complete_recipe)],
    overrides: Overrides = None,
) -> None:
    """Print the keys in which two configs differ. Overrides apply to the second config."""
    with reported():
        from rl_core.config import diff as changes
        from rl_launch.run_config.reading import read_plan

        old, new = read_plan(first).root, read_plan(second, overrides or ()).root
        for change in changes(old, new):
            sys.stdout.write(f"{change}\n")
