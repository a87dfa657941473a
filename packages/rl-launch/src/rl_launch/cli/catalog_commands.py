"""`rl recipes`, `rl init`, `rl env` and `rl data`: choices for a config, and environments and rows tried."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_launch.cli import explanation_text
from rl_launch.cli.completion import (
    complete_algorithm,
    complete_dataset,
    complete_environment,
    complete_recipe,
    complete_rows,
    complete_task,
)
from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, argument, keys, named, option, write_json
from rl_launch.recipes import recipe_names

if TYPE_CHECKING:
    from rl_launch.commands.catalog import Choice

environments = typer.Typer(no_args_is_help=True)
data = typer.Typer(no_args_is_help=True)

All = Annotated[bool, option("--all", "Show the settings of all entries.")]
Name = Annotated[
    str,
    argument(
        "NAME|FILE.yaml",
        "An installed environment, file.py:NAME, package.module:NAME, or a recipe, YAML file or run directory.",
        complete_environment,
    ),
]
Settings = Annotated[
    list[str] | None,
    argument("[KEY=VALUE]...", "Settings of the environment, and keys of data.train such as data.train.split=test."),
]
Data = Annotated[
    str,
    option(
        "--data",
        "Rows (default: the installed dataset of the same name).",
        "FILE|DATASET",
        autocompletion=complete_dataset,
    ),
]
Prompt = Annotated[str, option("--prompt", "Use a single row with this prompt instead.", "TEXT")]
Fields = Annotated[str, option("--fields", """Fields of that row, such as '{"answer": "42"}'.""", "JSON")]


def recipes(
    words: Annotated[
        list[str] | None,
        argument(
            "[NAME|WORD]...",
            "A recipe to print, or words to search for; recipes with all words are listed.",
            complete_recipe,
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
    recipe: Annotated[str, named("RECIPE", "The recipe to copy.")],
    output: Annotated[
        Path | None,
        option("--output -o", "The file to write (default: RECIPE.yaml in the current folder).", "FILE.yaml"),
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


@environments.command("list")
def list_environments(
    name: Annotated[
        str | None, argument("[NAME]", "Show only this environment, with its settings.", complete_environment)
    ] = None,
    everything: All = False,
) -> None:
    """List the installed environments. With a name or --all, show their settings, which are set under `env.NAME`."""
    with reported():
        from rl_launch.commands.catalog import chosen, shared_settings
        from rl_launch.commands.catalog import environments as found

        known = found()
        if name is not None:
            sys.stdout.write(explanation_text.choice(chosen(known, name, "environment"), "rl env list"))
            return
        if not everything:
            sys.stdout.write(explanation_text.names({each.name: _line(each) for each in known.values()}))
            sys.stdout.write("\nrl env list NAME shows the settings of one, rl env list --all those of all\n")
            return
        shared = shared_settings()
        everywhere = {each.key.rpartition(".")[2] for each in shared}
        for each in known.values():
            own = tuple(setting for setting in each.settings if setting.key.rpartition(".")[2] not in everywhere)
            sys.stdout.write(explanation_text.choice(replace(each, settings=own), "rl env list"))
        sys.stdout.write(explanation_text.settings("settings of every environment", shared))


@environments.command("run")
def run_environment(
    name: Name,
    settings: Settings = None,
    data: Data = "",
    prompt: Prompt = "",
    fields: Fields = "",
    row: Annotated[int, option("--row", "Use the Nth row.", "N", min=1)] = 1,
    scripted: Annotated[
        Path | None, option("--scripted", "Completions, each followed by a line with a single dot.", "FILE")
    ] = None,
    model: Annotated[
        str, option("--model", "Sample from a model; keys such as policy.generation.temperature=0.5.", "MODEL")
    ] = "",
    max_turns: Annotated[int, option("--max-turns", "Maximum number of turns.", min=1)] = 20,
    program: Annotated[str, option("--program", "The rollout program.")] = "multi_turn",
    tool_format: Annotated[
        str | None, option("--tool-format", "Format of tool calls, such as llama.", "FORMAT")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try an environment: type the completions of the policy, and see the observations and rewards.

    A completion can have several lines. A line with a single dot ends it. Write tool calls in the format of Hermes
    models, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or in the --tool-format. The exit code is 1 if the
    rollout fails.

    With --json: the record of the rollout, as in rollouts/step_N.jsonl of a run.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.commands.environments.source import environment_of
        from rl_launch.run_session import show_logs

        if model and scripted is not None:
            raise ConfigError("--model and --scripted cannot be combined")
        of_model = [each for each in settings or () if each.startswith(("policy.", "cluster."))]
        if of_model and not model:
            raise ConfigError(f"{of_model[0]} is the key of a model. Pass the model with --model")
        others = [each for each in settings or () if each not in of_model]
        given = environment_of(name, others, data, prompt, fields)
        if row > len(given.rows):
            raise ConfigError(f"--row: got {row}, but the data has {len(given.rows)} rows")
        show_logs()

        # imports transformers, which takes a second
        from rl_launch.commands.environments.run import Course, model_player, play, written_player

        course, output = Course(program, max_turns, tool_format), sys.stderr if as_json else sys.stdout
        if model:
            player = model_player(model, of_model, course, given)
        else:
            player = written_player(None if scripted is None else scripted.expanduser(), course)
            if scripted is None and sys.stdin.isatty():
                output.write("(end a completion with a line that contains a single dot)\n")
        record = play(given, given.rows[row - 1], player, output)
        if as_json:
            write_json(record)
        if record["status"] == "failed":
            raise typer.Exit(1)


@environments.command("check")
def check_environment(
    name: Name,
    settings: Settings = None,
    data: Data = "",
    prompt: Prompt = "",
    fields: Fields = "",
    responses: Annotated[
        list[str] | None, option("--response", "Also try this response on every row. May be repeated.", "TEXT")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check on the first rows that an environment works in rollouts. Prints one line per check, with the remedy.

    The environment must start, find the fields that it requests, return finite rewards for every response within its
    deadline, and handle malformed tool calls. It must return the same results when the calls are repeated, reordered,
    batched, or mixed with other conversations. The responses are the answer of a row in common forms, an empty string,
    and the --response values. A warning is printed if a reward is the same for all of them. Ten sample rewards are
    shown. The exit code is 1 if a check fails.

    With --json: {"schema": 1, "holds", "checks": [{"name", "status": "ok"|"warned"|"failed"|"skipped", "said",
    "remedy"}, ...], "samples": [{"place", "response", "rewards", "num_turns", "done"}, ...]}.
    """
    with reported():
        from rl_launch.commands.environments import check
        from rl_launch.commands.environments.source import environment_of

        given = environment_of(name, settings or [], data, prompt, fields)
        of_code = given.instance.config.type or given.instance.name
        found = check.check_environment(given, responses or ())
        if as_json:
            write_json(check.as_json(found))
        else:
            sys.stdout.write(check.as_text(found, check.sought_texts(of_code)))
        if not found.holds:
            raise typer.Exit(1)


@data.command("list")
def list_datasets(
    name: Annotated[
        str | None, argument("[NAME]", "Show only this dataset, with its settings and tasks.", complete_dataset)
    ] = None,
    task: Annotated[str | None, argument("[TASK]", "Show the settings of this task.", complete_task)] = None,
    everything: All = False,
) -> None:
    """List the installed datasets, and hub datasets that need only a name (`data.train.dataset_name: OWNER/NAME`). With
    a name or --all, show their settings, which are set under `data.train.settings`.

    For files (`data.train.data_path`) and other hub datasets, set their columns with keys of `data.train`.
    """
    with reported():
        from rl_launch.commands.catalog import chosen, hub_datasets
        from rl_launch.commands.catalog import datasets as found

        known, hub = found(), hub_datasets()
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
            sys.stdout.write(explanation_text.names({task.name: task.doc for task in each.tasks.values()}))


@data.command("show")
def show_rows(
    recipe: Annotated[
        str,
        argument(
            "FILE|DATASET|RECIPE|FILE.yaml|RUN",
            "Data (JSON Lines, Parquet, ..., or the name of a dataset), or a config with data.",
            complete_rows,
        ),
    ],
    overrides: Annotated[list[str] | None, keys("Config keys to set, such as data.train.input_key=question.")] = None,
    model: Annotated[str, option("--model", "Use the tokenizer and chat template of this model.", "MODEL")] = "",
    algorithm: Annotated[
        str,
        option(
            "--algorithm",
            "Read a data file as this algorithm does (default: inferred from its columns).",
            "NAME",
            autocompletion=complete_algorithm,
        ),
    ] = "",
    rows: Annotated[int, option("--rows", "Show the first N rows.", "N", min=0)] = 3,
    row: Annotated[int | None, option("--row", "Show only the Nth row.", "N", min=1)] = None,
    over: Annotated[int | None, option("--over", "Count over the first N rows (default: 1000).", "N", min=1)] = None,
    validation: Annotated[bool, option("--validation", "Show the validation data.")] = False,
    contamination: Annotated[
        bool, option("--contamination", "Find validation prompts and prompts of tasks that the training rows contain.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how rows of data are read: the text of the model with special tokens, the parts that are learned (green, or
    between « and » without colours), and the fields that rewards receive.

    Rows that are too long or refused are shown with the reason. A summary line counts tokens and such rows over the
    first rows of each dataset. No run is started. The exit code is 1 if one of these rows ends a run of the config.

    With --json: {"schema": 1, "algorithm", "model", "limit", "datasets": [{"name", "num_rows", "rows": [{"number",
    "place", "texts": [{"title", "num_tokens", "num_learned", "too_long", "spans": [{"text", "learned"}, ...]}, ...],
    "environment", "fields", "not_used"}, ...], "counts": {"num_read", "tokens": {"min", "median", "max"},
    "num_learned", "num_too_long", "not_used": {REASON: COUNT}, "num_ending"}}, ...], "contamination": {TASK:
    {"num_prompts", "prompts": {PLACE: {"kind", "place", "share"}}}}}.
    """
    with reported():
        from rich.console import Console

        from rl_core.errors import ConfigError
        from rl_launch.cli import data_text
        from rl_launch.commands import data_rows
        from rl_launch.commands.data_rows import MAX_READ, counts, ends_run, given_rows, shown_row
        from rl_launch.evaluation.result import show_contamination

        given = given_rows(recipe, overrides or (), model=model, algorithm=algorithm, validation=validation)
        if row is not None and all(row > len(dataset.numbers) for dataset in given.datasets):
            sizes = ", ".join(f"{dataset.name} has {len(dataset.numbers)} rows" for dataset in given.datasets)
            raise ConfigError(f"--row: got {row}; {sizes}")
        shown = []
        for dataset in given.datasets:
            size = len(dataset.numbers)
            chosen = range(1, min(rows, size) + 1) if row is None else range(row, row + 1) if row <= size else range(0)
            found = [shown_row(given, dataset, number) for number in chosen]
            shown.append((dataset, found, counts(given, dataset, over or MAX_READ)))
        contained = data_rows.contamination(given) if contamination else {}
        if as_json:
            values = data_text.as_json(given, shown, contained)
            sys.stdout.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        else:
            data_text.print_rows(recipe, given, shown, Console())
            for task, (num_prompts, overlaps) in contained.items():
                show_contamination(task, num_prompts, overlaps, Console())
        ends = any(counted.num_ending or any(ends_run(given, each) for each in found) for _, found, counted in shown)
        if given.is_run and ends:
            raise typer.Exit(1)


def _line(each: Choice) -> str:
    """Return an environment or dataset as one line."""
    return f"(not installed) {each.doc}" if each.missing else each.doc
