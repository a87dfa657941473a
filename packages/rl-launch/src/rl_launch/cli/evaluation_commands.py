"""`rl eval` and `rl compare`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_launch.cli.completion import complete_override, complete_recipe, complete_tasks
from rl_launch.cli.failure import reported

if TYPE_CHECKING:
    from rl_algos.evaluation.comparison import Comparison

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Result = Annotated[Path, typer.Argument(help="Folder of an evaluation, or its eval.json.")]


def evaluate(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN[:STEP]|RECIPE|FILE.yaml",
            help="A Hugging Face folder or hub name, a run (its newest checkpoint), a recipe, or an evaluation to "
            "resume.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Config keys to set, such as eval.num_samples=8 or run_dir=DIR.",
            autocompletion=complete_override,
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="NAME|FILE,...",
            help="Tasks to score, such as gsm8k,reasoning_gym/chain_sum, and files of data, such as problems.jsonl or "
            "NAME=problems.jsonl (default: the run's validation data).",
            autocompletion=complete_tasks,
        ),
    ] = "",
    against: Annotated[
        Path | None, typer.Option("--against", metavar="RESULT", help="Compare with an earlier evaluation.")
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more log messages.")] = False,
) -> None:
    """Score a model on tasks, or on a run's validation data, without training it.

    The results are written to run_dir (default: a new folder below runs): eval.json, rollouts.jsonl and logs. To resume
    an interrupted evaluation, use rl eval DIR. For all keys of eval, use rl config explain RECIPE eval.

    Rows of a file are scored by the environment in the row, the environment of the run, or eval.default.env_name:
    rl eval MODEL --tasks problems.jsonl eval.default.env_name=math eval.num_samples=4 eval.temperature=0.8

    With --json: {"schema": 1, "mean_reward", "num_prompts", "num_rollouts", "num_failed", "path", "tasks": {TASK:
    {"estimates": {"mean": {"value", "low", "high"}, "pass@K": ..., "cons@K": ...}, "num_truncated", ...}},
    "comparison": {TASK: as rl compare}}.
    """
    with reported() as failure:
        from rl_launch.evaluation.result import EvaluationResult, compare_results
        from rl_launch.evaluation.source import evaluation_of
        from rl_launch.session import show_logs

        earlier = None if against is None else EvaluationResult.read(against)
        given = evaluation_of(recipe, overrides or (), [name.strip() for name in tasks.split(",") if name.strip()])
        failure.run_dir = given.folder

        from rl_launch.commands.evaluate import evaluate as run

        show_logs(verbose=verbose)
        result = run(given.plan, folder=given.folder)
        compared = None if earlier is None else compare_results(earlier, result)
        if as_json:
            found = {"schema": 1, "mean_reward": result.mean_reward, **result.counts, "path": str(result.path)}
            found["tasks"] = {name: asdict(summary) for name, summary in result.tasks.items()}
            if compared is not None:
                found["comparison"] = {name: _as_json(each) for name, each in compared.items()}
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        from rich.console import Console

        from rl_launch.evaluation.table import show_comparison, show_result

        show_result(result, Console())
        if earlier is not None and compared is not None:
            show_comparison(earlier, result, compared, Console())


def compare(first: Result, second: Result, as_json: AsJson = False) -> None:
    """Compare two evaluations on their common prompts: difference, interval and significance by task.

    With --json: {"schema": 1, "tasks": {TASK: {"num_prompts", "first", "second", "difference": {"value", "low",
    "high"}, "p_value", "is_significant", "num_better", "num_worse", "num_only_first", "num_only_second",
    "confidence"}}}.
    """
    with reported():
        from rl_launch.evaluation.result import EvaluationResult, compare_results

        results = EvaluationResult.read(first), EvaluationResult.read(second)
        compared = compare_results(*results)
        if as_json:
            found = {"schema": 1, "tasks": {name: _as_json(each) for name, each in compared.items()}}
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        from rich.console import Console

        from rl_launch.evaluation.table import show_comparison

        show_comparison(*results, compared, Console())


def _as_json(comparison: Comparison) -> dict[str, object]:
    return {**asdict(comparison), "is_significant": comparison.is_significant}
