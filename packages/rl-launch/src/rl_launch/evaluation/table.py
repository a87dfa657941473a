"""Results and comparisons as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from rl_algos.evaluation.estimates import ModelComparison
from rl_algos.evaluation.summary import listed
from rl_launch.evaluation.result import EvaluationResult

_MIN_TRUNCATED_SHARE = 0.05


def show_result(result: EvaluationResult, console: Console) -> None:
    """Print a row for each estimate of each task, and the numbers of samples that failed or were truncated."""
    table = Table(title=result.model)
    for name in ("task", "estimate"):
        table.add_column(name)
    for name in ("value", f"{100 * result.confidence:g} % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, summary in result.tasks.items():
        for name, found in summary.estimates.items():
            table.add_row(task, name, f"{found.value:.4g}", f"{found.low:.3g} to {found.high:.3g}")
    console.print(table)
    for task, summary in result.tasks.items():
        console.print(
            f"{task}: {summary.num_prompts} prompts, {summary.num_rollouts} samples, {summary.mean_length:.0f} tokens "
            f"each, {summary.num_failed} failed, {summary.num_truncated} truncated",
            soft_wrap=True,
        )
    for task, summary in result.tasks.items():
        for dataset, mean in summary.by_dataset.items():
            console.print(f"{task}, {dataset}: mean {mean:.4g}", soft_wrap=True)
        if summary.num_failed:
            console.print(f"{task}: failed samples score 0: {listed(summary.failures)}", soft_wrap=True, markup=False)
        if summary.num_truncated > _MIN_TRUNCATED_SHARE * summary.num_rollouts:
            console.print(
                f"{task}: {summary.num_truncated} of {summary.num_rollouts} samples were cut off by a token or turn "
                "limit. Increase eval.max_new_tokens and policy.max_total_sequence_length, or eval.max_turns",
                soft_wrap=True,
            )
    console.print(f"Results and rollouts: {result.path}", soft_wrap=True)


def show_comparison(
    first: EvaluationResult, second: EvaluationResult, by_task: Mapping[str, ModelComparison], console: Console
) -> None:
    """Print a row for each task: both means, their difference and whether it is significant."""
    confidence = next(iter(by_task.values())).confidence
    table = Table(title=f"Paired comparison ({100 * confidence:g} %)")
    table.add_column("task")
    for name in ("prompts", "A", "B", "B - A", "interval", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, found in by_task.items():
        table.add_row(
            task,
            str(found.num_prompts),
            f"{found.first:.4g}",
            f"{found.second:.4g}",
            f"{found.difference.value:+.4g}",
            f"{found.difference.low:+.3g} to {found.difference.high:+.3g}",
            f"{found.p_value:.3g}",
        )
    console.print(table)
    console.print(f"A: {first.model}  ({first.path})", soft_wrap=True)
    console.print(f"B: {second.model}  ({second.path})", soft_wrap=True)
    for task, found in by_task.items():
        verdict = "significant" if found.is_significant else "not significant"
        console.print(
            f"{task}: the difference is {verdict}; B scores more on {found.num_better} prompts and less on "
            f"{found.num_worse}",
            soft_wrap=True,
        )
        if found.num_only_first or found.num_only_second:
            console.print(
                f"{task}: {found.num_only_first} prompts of A and {found.num_only_second} of B are in one result only "
                "and are left out",
                soft_wrap=True,
            )
