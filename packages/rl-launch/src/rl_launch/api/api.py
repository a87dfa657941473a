"""Runs from Python: `rl train`, `rl eval` and `rl compare` as functions, for scripts and notebooks."""

from __future__ import annotations

import ast
import inspect
import json
import signal
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rl_algos.evaluation.estimates import ModelComparison
from rl_core.config.tree import PYTHON, format_path, given_in, parse_path
from rl_core.errors import ConfigError, DataError, RunDirectoryError
from rl_core.exports import public_home
from rl_core.run import Callback
from rl_launch.api.in_memory_rows import with_paths, without_rows
from rl_launch.commands.start import run_of
from rl_launch.evaluation.result import EvaluationResult, compare_results
from rl_launch.evaluation.source import evaluation_of
from rl_launch.run_session import ADAPTER, EXPORT, show_logs
from rl_launch.run_session.directory.row_files import RowFile, kept
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import HEADLINES

_DOTTED = ("optimizer", "scheduler")
"""Sections whose classes have dotted names without a colon, such as torch's."""


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


def told_plainly(function: Callable[P, T]) -> Callable[P, T]:
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


@told_plainly
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
    values = Values.of(config, overrides)
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


@told_plainly
def evaluate(
    config: Source,
    overrides: Overrides = (),
    *,
    tasks: Sequence[str] = (),
    contamination: bool = False,
    verbose: bool = False,
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
        contamination: True to find the prompts that the training rows of the run or recipe contain.
        verbose: Log more.

    Raises:
        As `train`; also `ConfigError` if the algorithm has no evaluation by rollouts, and `RolloutsFailed` if every
        sample failed.
    """
    show_logs(verbose=verbose)
    values = Values.of(config, overrides)
    given = evaluation_of(*values.given(), tasks)
    if values.files:
        given = evaluation_of(*values.given(given.folder), tasks)

    # imports what only a run needs
    from rl_launch.commands.evaluate import evaluate as run

    with kept(values.files, given.folder, given.plan.config.logger.run_dir_access):
        return run(given.plan, folder=given.folder, trained=given.training() if contamination else None)


@told_plainly
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
class Values:
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
    def of(cls, config: Source, overrides: Overrides) -> Values:
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


def with_names(config: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Replace every function and class in nested plain values by its name, every path by its text, and a callback that
    is a dataclass by its class and settings.

    A function or class of an installed package is named `package.module:Name`, one in a file `file.py:Name`: workers
    get that file, and run it.

    Raises:
        ConfigError: If a worker could not find one by its name, or a value cannot be part of a config.
    """
    match config:
        case Mapping():
            return {str(key): with_names(value, (*path, str(key))) for key, value in config.items()}
        case list() | tuple():
            return [with_names(value, (*path, index)) for index, value in enumerate(config)]
        case Path():
            return str(config)
        case Callback() if is_dataclass(config):
            settings = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
            kind = _name(type(config), format_path(path), is_dotted=False)
            return {"type": kind, "settings": with_names(settings, path)}
        case Callback():
            raise ConfigError(
                f"{format_path(path)}: got an instance of {type(config).__name__}, whose settings cannot be read; give "
                'the class, or {"type": the class, "settings": {...}}, or make the class a dataclass'
            )
        case _ if inspect.isclass(config) or inspect.isroutine(config):
            return _name(config, format_path(path), is_dotted=bool(set(_DOTTED) & set(path)))
        case None | bool() | int() | float() | str():
            return config
        case _:
            raise ConfigError(
                f"{format_path(path) or 'config'}: a {type(config).__name__} cannot be a value of a config; give "
                "numbers, strings, lists and mappings, functions and classes, or, in data.train and data.validation, "
                "rows"
            )


def _name(target: Any, key: str, *, is_dotted: bool) -> str:
    name = target.__qualname__
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else "defined inside a function"
        raise ConfigError(f"{key}: {name} is {what}, so workers cannot import it; define it at the top level of a file")
    module, home = sys.modules.get(target.__module__), public_home(target.__module__, name.partition(".")[0])
    if module is not None:
        # modules of an installed package or of Python itself can be imported by workers by their name
        place = getattr(module, "__file__", None)
        folders = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
        is_installed = module.__name__ != "__main__"
        if place is not None:
            top = module.__name__.partition(".")[0]
            is_installed = any(map(Path(place).is_relative_to, folders)) or top in packages_distributions()
        if home != target.__module__ or is_installed:
            return f"{home}{'.' if is_dotted else ':'}{name}"
    found = None
    with suppress(TypeError):
        found = inspect.getsourcefile(target)
    file = Path(found).absolute() if found else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise ConfigError(
            f"{key}: {name} is defined in a notebook or an interactive session, but workers need a file. Write it to a "
            f"file (in a notebook, %%writefile mine.py at the top of its cell) and give its name, 'mine.py:{name}'"
        )
    if target.__module__ == "__main__":
        _check_script(file, name, key)
    return f"{file}:{name}"


def _check_script(file: Path, name: str, key: str) -> None:
    """Refuse a script that does more than define things when it runs: workers run the file to get the function."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        is_call = isinstance(statement, ast.Expr | ast.With | ast.For | ast.While)
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        called = {
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            for node in (ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ())
            if isinstance(node, ast.Call)
        }
        if (is_call and not is_text) or called & {"train", "evaluate"}:
            raise ConfigError(
                f"{key}: workers run {file.name} to get {name}, and line {statement.lineno} would run there as well. "
                f'Put the code that starts the run below `if __name__ == "__main__":`, or {name} into a file of its own'
            )
