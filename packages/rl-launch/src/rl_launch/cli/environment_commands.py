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
        help="An installed environment, file.py:NAME, package.module:NAME, or a recipe, YAML file or run directory.",
        autocompletion=complete_environment,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings of the environment, and keys of data.train such as data.train.split=test.",
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
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Use a single row with this prompt instead.")]
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
    row: Annotated[int, typer.Option("--row", metavar="N", min=1, help="Use the Nth row.")] = 1,
    scripted: Annotated[
        Path | None,
        typer.Option("--scripted", metavar="FILE", help="Completions, each followed by a line with a single dot."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Sample from a model; keys such as policy.generation.temperature=0.5."
        ),
    ] = "",
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Maximum number of turns.")] = 20,
    program: Annotated[str, typer.Option("--program", help="The rollout program.")] = "multi_turn",
    tool_format: Annotated[
        str | None, typer.Option("--tool-format", metavar="FORMAT", help="Format of tool calls, such as llama.")
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
        from rl_launch.commands.environment_source import GivenData, environment_of
        from rl_launch.session import show_logs

        if model and scripted is not None:
            raise ConfigError("--model and --scripted cannot be combined")
        of_model = [each for each in settings or () if each.startswith(("policy.", "cluster."))]
        if of_model and not model:
            raise ConfigError(f"{of_model[0]} is the key of a model. Pass the model with --model")
        others = [each for each in settings or () if each not in of_model]
        given = environment_of(name, others, GivenData(data, prompt, fields))
        if row > len(given.rows):
            raise ConfigError(f"--row: got {row}, but the data has {len(given.rows)} rows")
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
                output.write("(end a completion with a line that contains a single dot)\n")
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
        typer.Option("--response", metavar="TEXT", help="Also try this response on every row. May be repeated."),
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
