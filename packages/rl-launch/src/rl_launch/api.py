"""Runs from Python: `rl train`, `rl eval` and `rl compare` as functions, for scripts and notebooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rl_algos.evaluation.comparison import Comparison
from rl_core.errors import ConfigError, DataError, RunDirectoryError
from rl_launch.commands.start import GivenRun, run_of
from rl_launch.evaluation.result import EvaluationResult, compare_results
from rl_launch.evaluation.source import evaluation_of
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
def evaluate(
    config: Source, overrides: Overrides = (), *, tasks: Sequence[str] = (), verbose: bool = False
) -> EvaluationResult:
    """Score a model on tasks, or on the validation data of a run or recipe, and return the result.

    Args:
        config: a model's folder or hub name, a run directory, `RUN:STEP` or a checkpoint, the folder of an evaluation
            to go on with, or as `train` takes it.
        overrides: keys to set; results, rollouts and logs are written into `run_dir`. An evaluation that was ended
            there goes on.
        tasks: names of tasks, such as `gsm8k` or `reasoning_gym/chain_sum`; those of the config, or its validation
            data, if empty.
        verbose: log more.

    Raises:
        As `train`; also `ConfigError` if the algorithm has no evaluation by rollouts, and `RolloutsFailed` if every
        sample failed.
    """
    show_logs(verbose=verbose)
    source = with_names(config) if isinstance(config, Mapping) else str(config)
    given = evaluation_of(source, _texts(overrides), tasks)

    # imports what only a run needs
    from rl_launch.commands.evaluate import evaluate as run

    return run(given.config, folder=given.folder)


@_told_plainly
def compare(first: str | Path | EvaluationResult, second: str | Path | EvaluationResult) -> dict[str, Comparison]:
    """Compare two evaluations by task, on the prompts that they share.

    Args:
        first, second: results, or folders of evaluations.

    Raises:
        ConfigError: if one is not the result of an evaluation, or they share no task or no prompt.
    """
    return compare_results(
        *(each if isinstance(each, EvaluationResult) else EvaluationResult.read(each) for each in (first, second))
    )


def result_of(run_dir: Path) -> TrainResult:
    """The result of the run in a folder."""
    run = RunFolder(run_dir)
    best = run.best_checkpoint()
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
