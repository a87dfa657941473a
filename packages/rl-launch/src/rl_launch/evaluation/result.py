"""The result of an evaluation, and the comparison of two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_algos.evaluation.estimates import Estimate, ModelComparison, compare
from rl_algos.evaluation.summary import Summary
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
    """

    path: Path
    model: str
    tasks: Mapping[str, Summary]
    prompts: Mapping[str, tuple[ScoredPrompt, ...]]
    confidence: float

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
        return {
            "schema": 1,
            "model": self.model,
            "confidence": self.confidence,
            "tasks": {name: asdict(summary) for name, summary in self.tasks.items()},
            "prompts": {name: [[p.id, p.digest, list(p.rewards)] for p in task] for name, task in self.prompts.items()},
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
            return cls(file.parent, data["model"], tasks, prompts, data["confidence"])
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
