"""Runs from Python: `rl train`, `rl eval` and `rl compare` as functions, for scripts and notebooks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rl_algos.evaluation.estimates import ModelComparison
from rl_core.config.tree import PYTHON, given_in, parse_path
from rl_core.errors import ConfigError, DataError, RunDirectoryError
from rl_launch.api.in_memory_rows import with_paths, without_rows
from rl_launch.api.named_objects import with_names
from rl_launch.commands.start import run_of
from rl_launch.evaluation.result import EvaluationResult, compare_results
from rl_launch.evaluation.source import evaluation_of
from rl_launch.session import ADAPTER, EXPORT, show_logs
from rl_launch.session.directory.row_files import RowFile, kept
from rl_launch.session.directory.run_folder import RunFolder
from rl_launch.session.directory.run_state import HEADLINES

P = ParamSpec("P")
T = TypeVar("T")

Source = str | Path | Mapping[str, Any]
"""A recipe's name, a YAML file, a run directory, or nested values with functions and classes where YAML has names, and
rows where it has files of data."""

Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, with functions, classes and rows too, or strings as the command line has them
(`grpo.seed=7`)."""


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A run that has ended. A notebook displays its outcome in a few lines.

    Args:
        run_dir: Its folder, which `rl show` reads and another call resumes.
        metrics: Metrics of every step, as `metrics.jsonl` has them.
        best_checkpoint: Hugging Face files of the checkpoint with the best `checkpointing.metric_name`, of the newest
            one if that is not set; None if none was saved.
        adapter: Adapters of that checkpoint in the format of `peft`; None if it has none.
        finished: True if the run made all its steps or met its goal; a time limit may have ended it before.
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
    """Raise mistakes in what the user wrote from the user's call, without the calls that found them. Messages name
    arguments of Python in place of a command line."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before = given_in.set(PYTHON)
        try:
            return function(*args, **kwargs)
        except (ConfigError, DataError, RunDirectoryError) as error:
            raise error.with_traceback(None) from None
        finally:
            given_in.reset(before)

    return call


@_told_plainly
def train(
    config: Source, overrides: Overrides = (), *, fresh: bool = False, branch_from: str = "", verbose: bool = False
) -> TrainResult:
    """Train by a config, and return the result.

    A script that calls it does so below `if __name__ == "__main__":`, as workers run the files of its functions.

    Args:
        config: A recipe's name, a YAML file, a run directory to resume, or a mapping with the contents of such a file,
            with functions and classes in place of their names, and rows in place of files.
        overrides: Keys to set, `run_dir` among them; a folder that holds a run of the same config is resumed. The value
            of `data.train` or `data.validation` may be rows: a `datasets.Dataset`, a list of dicts, or a generator of
            dicts or a function that returns one. They are written once into the run's folder, under a name with a
            digest of them, so that a call with the same rows resumes the run.
        fresh: Refuse to resume an earlier run.
        branch_from: `RUN[:STEP]`, a run (and its step) whose checkpoint a new run starts from.
        verbose: Log more.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If the run fails.
        KeyboardInterrupt: If it is interrupted (Ctrl-C, or the interrupt of a notebook), after it has finished its step
            and saved, so that the cells and statements after this call do not run. The same call resumes it.
        SystemExit: If SIGTERM ends it, likewise.
    """
    show_logs(verbose=verbose)
    values = _Values.of(config, overrides)
    given = run_of(*values.given(), branch_from)
    if values.files:
        given = run_of(*values.given(given.run_dir), branch_from)

    # imports what only a run needs
    from rl_launch.commands.train import train as run

    with kept(values.files, given.run_dir, given.plan.config.logger.run_dir_access):
        outcome = run(given.plan, run_dir=given.run_dir, title=given.name, fresh=fresh, branch_point=given.branch_point)
    if outcome.stop_signal == signal.SIGINT:
        raise KeyboardInterrupt(f"the run in {given.run_dir} was interrupted and has saved; the same call resumes it")
    outcome.exit_if_stopped()
    return result_of(given.run_dir)


@_told_plainly
def evaluate(
    config: Source, overrides: Overrides = (), *, tasks: Sequence[str] = (), verbose: bool = False
) -> EvaluationResult:
    """Score a model on tasks, or on the validation data of a run or recipe, and return the result.

    Args:
        config: A model's folder or hub name, a run directory, `RUN:STEP` or a checkpoint, the folder of an evaluation
            to go on with, or as `train` takes it.
        overrides: Keys to set, as `train` takes them; results, rollouts and logs are written into `run_dir`. An
            evaluation that was ended there continues. `data.validation` and the `dataset` of a task in `eval.tasks` may
            be rows.
        tasks: Names of tasks, such as `gsm8k` or `reasoning_gym/chain_sum`; the tasks of the config, or its validation
            data, if empty.
        verbose: Log more.

    Raises:
        As `train`; also `ConfigError` if the algorithm has no evaluation by rollouts, and `RolloutsFailed` if every
        sample failed.
    """
    show_logs(verbose=verbose)
    values = _Values.of(config, overrides)
    given = evaluation_of(*values.given(), tasks)
    if values.files:
        given = evaluation_of(*values.given(given.folder), tasks)

    # imports what only a run needs
    from rl_launch.commands.evaluate import evaluate as run

    with kept(values.files, given.folder, given.plan.config.logger.run_dir_access):
        return run(given.plan, folder=given.folder)


@_told_plainly
def compare(first: str | Path | EvaluationResult, second: str | Path | EvaluationResult) -> dict[str, ModelComparison]:
    """Compare two evaluations by task, on the prompts that they share.

    Args:
        first: Result of an evaluation, or its folder.
        second: Result to compare with the first, or its folder.

    Raises:
        ConfigError: If one is not the result of an evaluation, or they share no task or no prompt.
    """
    results = (each if isinstance(each, EvaluationResult) else EvaluationResult.read(each) for each in (first, second))
    return compare_results(*results)


def result_of(run_dir: Path) -> TrainResult:
    """Return the result of the run in a folder."""
    run = RunFolder(run_dir)
    best = run.best_checkpoint()
    files, adapter = (
        best.path / name if best is not None and (best.path / name).is_dir() else None for name in (EXPORT, ADAPTER)
    )
    return TrainResult(run.path, run.metrics(), files, adapter, run.state().status == "finished")


@dataclass(frozen=True)
class _Values:
    """The config and the overrides of a call. Every dataset of rows is a `RowFile`.

    Args:
        config: As it was given otherwise.
        overrides: Values by key, or strings as the command line has them.
        files: The files of rows.
    """

    config: Source
    overrides: Overrides
    files: Sequence[RowFile]

    @classmethod
    def of(cls, config: Source, overrides: Overrides) -> _Values:
        """Take the rows out of the arguments of a call.

        Raises:
            ConfigError: If rows cannot be stored; contains key, row and column.
        """
        if isinstance(overrides, str):
            raise ConfigError(
                f"overrides: got one string, {overrides!r}; give a list of strings, or a mapping of keys to values"
            )
        files: list[RowFile] = []
        if isinstance(config, Mapping):
            config, found = without_rows(config, ())
            files += found
        if isinstance(overrides, Mapping):
            values: dict[str, Any] = {}
            for key, value in overrides.items():
                values[key], found = without_rows(value, parse_path(key))
                files += found
            overrides = {}
            for key, value in values.items():
                match value:
                    # rows are set by their path, which keeps the other keys of a dataset that has a path
                    case {"data_path": RowFile() as file} if len(value) == 1:
                        overrides[f"{key}.data_path"] = file
                    case _:
                        overrides[key] = value
        return cls(config, overrides, files)

    def given(self, run_dir: Path | None = None) -> tuple[str | Mapping[str, Any], list[str]]:
        """Return the config and the overrides as strings, as a command line has them.

        Args:
            run_dir: Folder that will have the rows; None if it is not known yet.
        """
        config = self.config
        source = with_names(with_paths(config, run_dir)) if isinstance(config, Mapping) else str(config)
        if isinstance(self.overrides, Mapping):
            overrides = [
                f"{key}={json.dumps(with_names(with_paths(value, run_dir), parse_path(key)))}"
                for key, value in self.overrides.items()
            ]
        else:
            overrides = list(self.overrides)
        if run_dir is not None:
            # a folder that was named by the time of the first reading
            overrides = [*overrides, f"run_dir={json.dumps(str(run_dir))}"]
        return source, overrides
