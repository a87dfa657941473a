"""The result of an evaluation, and the comparison of two, also as tables in a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rl_algos.data.contamination import Overlap
from rl_algos.evaluation.estimates import Estimate, ModelComparison, compare
from rl_algos.evaluation.summary import Summary, listed
from rl_core.errors import ConfigError
from rl_launch.evaluation.folder import RESULT, is_evaluation


class ScoredPrompt(NamedTuple):
    """The rewards of one prompt.

    Args:
        id: Id of the prompt.
        digest: Digest of its messages: two results share a prompt if both agree.
        rewards: Rewards of its samples; a failed one earns 0.
    """

    id: str
    digest: str
    rewards: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """The result of an evaluation. A notebook displays its estimates.

    Args:
        path: Its folder, with `eval.json` and `rollouts.jsonl`.
        model: Folder or hub name of the model.
        tasks: Summary of each task by its name; `validation` is the run's validation data.
        prompts: Rewards of every prompt, by task.
        confidence: Confidence level of the intervals.
        contamination: Prompts that the training rows contain, by task and id; None if nobody looked.
    """

    path: Path
    model: str
    tasks: Mapping[str, Summary]
    prompts: Mapping[str, tuple[ScoredPrompt, ...]]
    confidence: float
    contamination: Mapping[str, Mapping[str, Overlap]] | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float64 `[prompts]`, mean reward of every prompt of all tasks."""
        return np.array([np.array(each.rewards).mean() for task in self.prompts.values() for each in task])

    @property
    def mean_reward(self) -> float:
        """Mean reward over all prompts of all tasks."""
        return float(self.rewards.mean())

    @property
    def counts(self) -> dict[str, int]:
        """Number of prompts, rollouts and failed rollouts of all tasks."""
        names = ("num_prompts", "num_rollouts", "num_failed")
        return {name: sum(getattr(task, name) for task in self.tasks.values()) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `eval.json`."""
        found = self.contamination or {}
        contained = {task: {id: asdict(each) for id, each in overlaps.items()} for task, overlaps in found.items()}
        return {
            "schema": 1,
            "model": self.model,
            "confidence": self.confidence,
            "tasks": {name: asdict(summary) for name, summary in self.tasks.items()},
            "prompts": {name: [[p.id, p.digest, list(p.rewards)] for p in task] for name, task in self.prompts.items()},
            **({"contamination": contained} if self.contamination is not None else {}),
        }

    @classmethod
    def read(cls, path: str | Path) -> EvaluationResult:
        """Return the result in the folder of an evaluation, or in its `eval.json`.

        Raises:
            ConfigError: If there is none.
        """
        given = Path(path).expanduser()
        file = given / RESULT if given.is_dir() else given
        if not file.is_file():
            unfinished = f"; it is not finished: rl eval {given}" if is_evaluation(given) else ""
            raise ConfigError(f"{path} is not the result of an evaluation (a folder with {RESULT}){unfinished}")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            tasks = {}
            for name, each in data["tasks"].items():
                estimates = {key: Estimate(**found) for key, found in each["estimates"].items()}
                tasks[name] = Summary(**{**each, "estimates": estimates})
            prompts = {
                name: tuple(ScoredPrompt(id, digest, tuple(rewards)) for id, digest, rewards in task)
                for name, task in data["prompts"].items()
            }
            contained = data.get("contamination")
            if contained is not None:
                contained = {
                    name: {id: Overlap(**found) for id, found in each.items()} for name, each in contained.items()
                }
            return cls(file.parent, data["model"], tasks, prompts, data["confidence"], contained)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is not the result of an evaluation: {error!r}") from None

    def __repr__(self) -> str:
        lines = [f"path={str(self.path)!r}", f"model={self.model!r}"]
        for name, summary in self.tasks.items():
            shown = ", ".join(f"{key} {each.value:.4g}" for key, each in summary.estimates.items())
            failed = f", {summary.num_failed} of {summary.num_rollouts} rollouts failed" if summary.num_failed else ""
            lines.append(f"{name}: {shown} on {summary.num_prompts} prompts{failed}")
        return "EvaluationResult(\n  " + ",\n  ".join(lines) + ",\n)"


def compare_results(first: EvaluationResult, second: EvaluationResult) -> dict[str, ModelComparison]:
    """Compare two results by task, on the prompts that they share. The confidence is taken from the first.

    Raises:
        ConfigError: If they have no task, or no prompt of a task, in common.
    """
    common = [name for name in first.tasks if name in second.tasks]
    if not common:
        raise ConfigError(
            f"{first.path} and {second.path} have no task in common: {', '.join(first.tasks)} and "
            f"{', '.join(second.tasks)}"
        )
    found = {}
    for name in common:
        try:
            found[name] = compare(
                _means(first.prompts[name]), _means(second.prompts[name]), confidence=first.confidence
            )
        except ValueError:
            raise ConfigError(
                f"{first.path} and {second.path} have no prompt of {name} in common: their data differ"
            ) from None
    return found


def _means(prompts: tuple[ScoredPrompt, ...]) -> dict[str, float]:
    return {f"{each.id} {each.digest}": float(np.array(each.rewards).mean()) for each in prompts}


_MIN_TRUNCATED_SHARE = 0.05
_MAX_OVERLAPS = 5


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
        if result.contamination is not None:
            show_contamination(task, summary.num_prompts, result.contamination[task], console)
            clean = [
                np.mean(each.rewards) for each in result.prompts[task] if each.id not in result.contamination[task]
            ]
            if len(clean) not in (0, summary.num_prompts):
                console.print(f"{task}: mean {np.mean(clean):.4g} on the other {len(clean)} prompts", soft_wrap=True)
    console.print(f"Results and rollouts: {result.path}", soft_wrap=True)


def show_contamination(task: str, num_prompts: int, found: Mapping[str, Overlap], console: Console) -> None:
    """Print how many prompts of a task the training rows contain, and the first of them."""
    kinds = [each.kind for each in found.values()]
    console.print(
        f"{task}: of {num_prompts} prompts, the training rows contain {kinds.count('copied')} and have "
        f"{kinds.count('similar')} similar ones",
        soft_wrap=True,
    )
    for name, each in islice(found.items(), _MAX_OVERLAPS):
        console.print(f"  {name}: {each.kind} ({each.share:.0%}) in {each.place}", soft_wrap=True, markup=False)
    if len(found) > _MAX_OVERLAPS:
        console.print(f"  and {len(found) - _MAX_OVERLAPS} others", soft_wrap=True)


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
