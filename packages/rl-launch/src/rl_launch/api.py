"""Runs from Python: `rl train` and `rl eval` as functions, for scripts and notebooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from rl_core.errors import ConfigError, DataError, RunDirectoryError
from rl_core.rollout import RolloutGroup
from rl_launch.commands.start import GivenRun, run_of
from rl_launch.named_objects import with_names
from rl_launch.session import ADAPTER, EXPORT, show_logs
from rl_launch.session.run_folder import RunFolder
from rl_launch.session.run_state import HEADLINES

P = ParamSpec("P")
T = TypeVar("T")

Source = str | Path | Mapping[str, Any]
"""A recipe's name, a YAML file, a run directory, or nested values with functions and classes where YAML has names."""

Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, or texts as the command line has them (`grpo.seed=7`)."""


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A run that has ended. A notebook displays its outcome in a few lines.

    Args:
        run_dir: its folder, which `rl show` reads and another call resumes.
        metrics: of every step, as `metrics.jsonl` has them.
        best_checkpoint: Hugging Face files of the checkpoint with the best `checkpointing.metric_name`, of the newest
            one if that is not set; None if none was saved.
        adapter: adapters of that checkpoint in the format of `peft`; None if it has none.
        finished: whether the run made all its steps or met its goal; a signal or a time limit may have ended it before.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    best_checkpoint: Path | None
    adapter: Path | None
    finished: bool

    @property
    def last_metrics(self) -> dict[str, Any]:
        """Metrics of the last step; empty if no step was made."""
        return self.metrics[-1] if self.metrics else {}

    def __repr__(self) -> str:
        last = self.last_metrics
        shown = {name: last[name] for name in ("step", *HEADLINES) if last.get(name) is not None}
        lines = (
            f"run_dir={str(self.run_dir)!r}",
            f"finished={self.finished}",
            f"last_metrics={shown}" + (f" and {len(last) - len(shown)} more" if len(last) > len(shown) else ""),
            f"best_checkpoint={None if self.best_checkpoint is None else str(self.best_checkpoint)!r}",
            *(() if self.adapter is None else (f"adapter={str(self.adapter)!r}",)),
        )
        return "TrainResult(\n  " + ",\n  ".join(lines) + ",\n)"


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """The rollouts of an evaluation. A notebook displays their mean reward and numbers.

    Args:
        groups: by prompt, in the order of the validation data.
        rewards: float64 `[prompts]`, the mean of each prompt's rollouts; a failed one earns 0.
    """

    groups: Sequence[RolloutGroup]
    rewards: np.ndarray

    @property
    def mean_reward(self) -> float:
        """Mean reward over all prompts."""
        return float(self.rewards.mean())

    def __repr__(self) -> str:
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        failed = sum(rollout.status == "failed" for rollout in rollouts)
        return (
            f"EvaluationResult(mean_reward={self.mean_reward:.4g}, {len(self.rewards)} prompts, "
            f"{len(rollouts)} rollouts, {failed} failed)"
        )


def _told_plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Raise mistakes in what the user wrote from the user's call, without the calls that found them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ConfigError, DataError, RunDirectoryError) as error:
            raise error.with_traceback(None) from None

    return call


@_told_plainly
def train(
    config: Source, overrides: Overrides = (), *, fresh: bool = False, branch_from: str = "", verbose: bool = False
) -> TrainResult:
    """Train by a config, and return the result.

    A script that calls it does so below `if __name__ == "__main__":`, as workers run the files of its functions.

    Args:
        config: a recipe's name, a YAML file, a run directory to resume, or a mapping with the contents of such a file,
            in which functions and classes may stand for their names.
        overrides: keys to set, `run_dir` among them; a folder that holds a run of the same config is resumed.
        fresh: refuse to resume an earlier run.
        branch_from: `RUN[:STEP]`, a run (and its step) whose checkpoint a new run starts from.
        verbose: log more.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: before anything is started.
        RLError: if the run fails.
    """
    show_logs(verbose=verbose)
    given = _run_of(config, overrides, branch_from)

    # imports what only a run needs
    from rl_launch.commands.train import train as run

    run(given.config, run_dir=given.run_dir, title=given.name, fresh=fresh, branch_point=given.branch_point)
    return result_of(given.run_dir)


@_told_plainly
def evaluate(config: Source, overrides: Overrides = (), *, verbose: bool = False) -> EvaluationResult:
    """Roll out the validation prompts of a config with the weights at `policy.model_name`, and score them.

    Args:
        config: as `train` takes it.
        overrides: keys to set; logs are written below `run_dir`.
        verbose: log more.

    Raises:
        As `train`; also `ConfigError` if the algorithm has no evaluation by rollouts.
    """
    show_logs(verbose=verbose)
    given = _run_of(config, overrides)

    # imports what only a run needs
    from rl_launch.commands.evaluate import evaluate as run

    evaluation = run(given.config, logs=given.run_dir / "logs")
    return EvaluationResult(evaluation.groups, evaluation.rewards)


def result_of(run_dir: Path) -> TrainResult:
    """The result of the run in a folder."""
    run = RunFolder(run_dir)
    checkpointing = run.config().get("checkpointing") or {}
    key = str(checkpointing.get("metric_name") or "").replace(":", "/", 1)
    sign = 1 if checkpointing.get("higher_is_better", True) else -1
    saved = run.checkpoints()
    ranked = [each for each in saved if each.metrics.get(key) is not None]
    best = max(ranked, key=lambda each: sign * each.metrics[key]) if ranked else saved[-1] if saved else None
    files = best.path / EXPORT if best is not None else None
    adapter = best.path / ADAPTER if best is not None and (best.path / ADAPTER).is_dir() else None
    return TrainResult(run.path, run.metrics(), files, adapter, run.state().status == "finished")


def _run_of(config: Source, overrides: Overrides, branch_from: str = "") -> GivenRun:
    source = with_names(config) if isinstance(config, Mapping) else str(config)
    return run_of(source, _texts(overrides), branch_from)


def _texts(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides: got one text, {overrides!r}; give a list of texts, or a mapping of keys to values"
        )
    if not isinstance(overrides, Mapping):
        return list(overrides)
    named: Mapping[str, Any] = {key: with_names(value, tuple(key.split("."))) for key, value in overrides.items()}
    return [f"{key}={json.dumps(value)}" for key, value in named.items()]
