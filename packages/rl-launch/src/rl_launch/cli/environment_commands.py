"""`rl env run` and `rl env check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli.completion import complete_dataset, complete_environment
from rl_launch.cli.failure import reported

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE.yaml",
        help="An installed environment, file.py:NAME or package.module:NAME; or a config, for its own and its data.",
        autocompletion=complete_environment,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Its settings, and keys of data.train such as data.train.split=test."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE|DATASET",
        help="Rows (default: the installed dataset of the same name).",
        autocompletion=complete_dataset,
    ),
]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="A single row instead: the text of its prompt.")]
Fields = Annotated[
    str, typer.Option("--fields", metavar="JSON", help="""Fields of that row, such as '{"answer": "42"}'.""")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def run(
    name: Name,
    settings: Settings = None,
    data: Data = "",
    prompt: Prompt = "",
    fields: Fields = "",
    row: Annotated[int, typer.Option("--row", metavar="N", min=1, help="Take the Nth row.")] = 1,
    scripted: Annotated[
        Path | None,
        typer.Option("--scripted", metavar="FILE", help="Completions, each ended by a line with a single dot."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Sample from a model; keys such as policy.generation.temperature=0.5."
        ),
    ] = "",
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Most turns.")] = 20,
    program: Annotated[str, typer.Option("--program", help="The rollout program.")] = "multi_turn",
    tool_format: Annotated[
        str | None, typer.Option("--tool-format", metavar="FORMAT", help="Format of tool calls, such as llama.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Talk to an environment: write the policy's completions, and see its observations and rewards.

    A completion may have several lines; a line with a single dot ends it. Tool calls are written as Hermes models do:
    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or in the --tool-format. The exit code is 1 if the
    rollout fails.

    With --json: the record of the rollout, as in rollouts/step_N.jsonl of a run.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.commands.environment_source import GivenData, environment_of
        from rl_launch.session import show_logs

        if model and scripted is not None:
            raise ConfigError("--model and --scripted both say who writes the completions; choose one")
        of_model = [each for each in settings or () if each.startswith(("policy.", "cluster."))]
        if of_model and not model:
            raise ConfigError(f"{of_model[0]} is a key of a model; name one with --model")
        others = [each for each in settings or () if each not in of_model]
        given = environment_of(name, others, GivenData(data, prompt, fields))
        if row > len(given.rows):
            raise ConfigError(f"--row: got {row}; the data has {len(given.rows)} rows")
        show_logs()

        # imports transformers, which takes a second
        from rl_launch.commands.environment_run import Course, model_player, play, scripted_player, typed_player

        course, output = Course(program, max_turns, tool_format), sys.stderr if as_json else sys.stdout
        if model:
            player = model_player(model, of_model, course, given)
        elif scripted is not None:
            player = scripted_player(scripted.expanduser(), course)
        else:
            player = typed_player(course)
            if sys.stdin.isatty():
                output.write("(end a completion with a line that holds a single dot)\n")
        record = play(given, given.rows[row - 1], player, output)
        if as_json:
            sys.stdout.write(json.dumps(record, indent=2) + "\n")
        if record["status"] == "failed":
            raise typer.Exit(1)


def check(
    name: Name,
    settings: Settings = None,
    data: Data = "",
    prompt: Prompt = "",
    fields: Fields = "",
    responses: Annotated[
        list[str] | None,
        typer.Option("--response", metavar="TEXT", help="Try this response on every row too. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that an environment behaves as rollouts need it to, on its first rows: a line each, with the remedy.

    It starts, finds the fields that it asks for, answers every response within its deadline with finite rewards, gives
    the same answers again, in another order, beside other conversations and in batches, and answers malformed calls of
    its tools. The responses are a row's answer in common forms, nothing, and those of --response; a warning says if all
    of them earn the same. Ten sample rewards are shown. The exit code is 1 if a check fails.

    With --json: {"schema": 1, "holds", "checks": [{"name", "status": "ok"|"warned"|"failed"|"skipped", "said",
    "remedy"}, ...], "samples": [{"place", "response", "rewards", "num_turns", "done"}, ...]}.
    """
    with reported():
        from rl_launch.commands.environment_check import as_json as plain
        from rl_launch.commands.environment_check import as_text, check_environment
        from rl_launch.commands.environment_source import GivenData, environment_of
        from rl_launch.commands.response_texts import sought_texts

        given = environment_of(name, settings or [], GivenData(data, prompt, fields))
        of_code = given.instance.config.type or given.instance.name
        found = check_environment(given, responses or ())
        text = json.dumps(plain(found), indent=2) + "\n" if as_json else as_text(found, sought_texts(of_code))
        sys.stdout.write(text)
        if not found.holds:
            raise typer.Exit(1)
