"""`rl sweep`: runs of all combinations of some values, one after another in one Ray, or at once on one base model."""

from __future__ import annotations

import itertools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rl_core.errors import ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.commands.preparation import check_run_dir
from rl_launch.commands.runs import Listing
from rl_launch.commands.shared_runs import SweptRun, base_of, shared_problem, shares_a_base, train_together
from rl_launch.commands.start import GivenRun, recipe_name, run_of
from rl_launch.commands.train import TrainOutcome, finished_metrics, train
from rl_launch.run_config.reading import read_raw
from rl_launch.run_session.directory.run_folder import RunFolder, is_run
from rl_launch.show.report import headings
from rl_launch.worker_envs.engine_checks import kept_check_processes

_log = logging.getLogger(__name__)

_RUN_DIR = "run_dir"
_MAX_VALUE_LENGTH = 40
"""Maximum number of characters that a value has in the name of a folder."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.+_]+")
_NUMBER = re.compile(r"-?[0-9.]+([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Sweep:
    """Runs to be made one after another, or at the same time if they share a base model.

    Args:
        folder: Has a folder for each run.
        keys: Keys that have several values.
        swept: As `rl train` makes them of the same overrides; the values of the last key change first.
    """

    folder: Path
    keys: tuple[str, ...]
    swept: tuple[SweptRun, ...]

    @property
    def runs(self) -> list[GivenRun]:
        """The runs."""
        return [each.given for each in self.swept]

    def folders(self) -> list[RunFolder]:
        """Return the runs that have begun."""
        return [RunFolder(run.run_dir) for run in self.runs if is_run(run.run_dir)]

    def listing(self) -> Listing:
        """Return the columns of its table: its keys, and the last and best value of the first headline of its runs."""
        states = [run.state() for run in self.folders()]
        metric = next((state.best.metric for state in states if state.best), None)
        keys = [*self.keys, *([metric, f"{metric}:best"] if metric else [])]
        return Listing(keys=keys, sort=metric or "", is_sweep=True)


def sweep_of(recipe: str, overrides: Sequence[str]) -> Sweep:
    """Read a sweep; all configs are checked.

    Args:
        recipe: A recipe's name, a YAML file, or the directory of a run with the config of all runs.
        overrides: Keys to set, some to several values: `sft.seed=1,2`. `run_dir` is the folder of the sweep.

    Raises:
        ConfigError: If the configs have problems, or no key has several values; lists every problem.
    """
    name = recipe_name(recipe)
    choices = [_choices(override) for override in overrides if not override.startswith(f"{_RUN_DIR}=")]
    keys = [choice[0].partition("=")[0] for choice in choices]
    swept = [place for place, choice in enumerate(choices) if len(choice) > 1]
    if not swept:
        raise ConfigError(
            f"no key has several values. Write KEY=A,B for the keys to sweep, such as rl sweep {recipe} sft.seed=1,2. "
            "For a single run, use rl train"
        )
    if twice := [keys[place] for place in swept if keys.count(keys[place]) > 1]:
        raise ConfigError(f"{twice[0]} is set twice. Set all its values at once: {twice[0]}=A,B")
    combined = list(itertools.product(*choices))
    folder = _folder(recipe, name, overrides, combined[0])
    values = [[each[place].partition("=")[2] for place in swept] for each in combined]
    swept_keys = [keys[place] for place in swept]
    runs, problems = [], []
    for run, settings in zip(run_names(swept_keys, values), combined, strict=True):
        given = (*settings, f"{_RUN_DIR}={folder / run}")
        try:
            found = SweptRun(run_of(recipe, given), recipe, given)
        except ConfigError as error:
            problems.append(f"{run}: {error}")
            continue
        if shares_a_base(found.given.plan) and (problem := shared_problem(found.given.plan)):
            problems.append(f"{run}: {problem}")
        runs.append(found)
    if problems:
        raise ConfigError("\n".join(problems))
    places = [place for run in runs if (place := run.given.plan.config.checkpointing.push_to) is not None]
    if len(set(places)) < len(places):
        raise ConfigError(
            f"checkpointing.push_to: several runs of the sweep would push to {places[0]}, and overwrite each other. "
            "Remove the key, and push one run with rl push RUN URL"
        )
    return Sweep(folder, tuple(swept_keys), tuple(runs))


def run_names(keys: Sequence[str], combinations: Sequence[Sequence[str]]) -> list[str]:
    """Return a different folder name for each combination of values, such as `lr-0.001_seed-2`.

    Args:
        keys: Keys that have several values.
        combinations: Values of these keys as they were typed, for each run.
    """
    short, names = headings(keys), list[str]()
    for values in combinations:
        parts = []
        for key, text in zip(short, values, strict=True):
            plain = _NOT_IN_NAMES.sub("-", text).strip("-")[-_MAX_VALUE_LENGTH:].strip("-.")
            parts.append(f"{key}-{(text if _NUMBER.fullmatch(text) else plain) or 'empty'}")
        name = "_".join(parts)
        others = (f"{name}-{number}" for number in itertools.count(2))
        names.append(name if name not in names else next(each for each in others if each not in names))
    return names


def run_sweep(sweep: Sweep, explained: Callable[[Exception, Path], str]) -> tuple[dict[str, str], TrainOutcome | None]:
    """Make the runs of a sweep. Finished ones are left as they are, interrupted ones are resumed, and after one that
    fails the others are made all the same.

    One Ray serves all runs. It is started again for a run whose `cluster` section differs, and after one that failed.
    Runs with `policy.lora_cfg.max_adapters` above 1 whose base model is the same are trained together, up to that
    number at a time.

    Args:
        sweep: The runs.
        explained: Returns the message for an error of the run in a folder.

    Returns:
        Messages by name of the runs that failed, and the end of the run that a signal ended, and the sweep with it;
        None if no signal came.

    Raises:
        ConfigError, RunDirectoryError: Before anything is started, if a run cannot use its folder or this machine.
        RLError: If Ray does not start.
    """
    for run in sweep.runs:
        check_run_dir(run.run_dir, run.plan, fresh=False)
    waiting = [run for run in sweep.swept if finished_metrics(run.given.run_dir, run.given.plan) is None]
    for left in waiting:
        check_devices(left.given.plan.config.cluster)
    failures: dict[str, str] = {}
    started: Any = None
    if waiting:
        # Ray takes a second to import, which sweeps that are finished should not wait for
        from rl_launch.cluster.virtual_cluster import VirtualCluster
    with ExitStack() as ray, _ended_by_sigterm():
        for together in _together(waiting):
            plan, names = together[0].given.plan, [run.name for run in together]
            number = waiting.index(together[0]) + 1
            which = f"run {number} of" if len(together) == 1 else f"{len(together)} runs on one base, of"
            _log.info("%s %d: %s", which, len(waiting), ", ".join(names))
            if plan.config.cluster != started:
                ray.close()
                started = plan.config.cluster
                device = resolve_device(started)
                if device.forks_workers:
                    ray.enter_context(kept_check_processes())
                ray.enter_context(VirtualCluster.of(started, device))
            error: Exception | None = None
            stopped: TrainOutcome | None = None
            try:
                if shares_a_base(plan):
                    failed, stopped = train_together(together, sweep.folder, explained)
                    failures |= failed
                else:
                    outcome = train(plan, run_dir=together[0].given.run_dir, title=names[0])
                    stopped = None if outcome.stop_signal is None else outcome
            except (ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError) as refused:
                error = refused
            except Exception as failure:  # noqa: BLE001  # the failure of one run must not cost the others
                error = failure
                # it may have left processes behind that hold devices
                ray.close()
                started = None
            if error is not None:
                for lost in together:
                    failures[lost.name] = explained(error, lost.given.run_dir)
                    _log.warning("%s failed: %s", lost.name, failures[lost.name])
            if stopped is not None:
                return failures, stopped
    return failures, None


def _together(runs: Sequence[SweptRun]) -> list[list[SweptRun]]:
    """Return the runs in the order in which they are made: each alone, or with the others that share its base."""
    groups: dict[str, list[SweptRun]] = {}
    for run in runs:
        key = base_of(run) if shares_a_base(run.given.plan) else run.name
        groups.setdefault(key, []).append(run)
    return list(groups.values())


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Unwind at SIGTERM between two runs, so that Ray is ended; runs have their own handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _choices(override: str) -> list[str]:
    """Return an override once for each of its values; as it is if it has no equals sign."""
    key, equals, text = override.partition("=")
    if not equals:
        return [override]
    texts = split_values(text)
    if len(texts) > 1 and ("" in texts or len(set(texts)) < len(texts)):
        problem = "a value is empty" if "" in texts else "a value is duplicated"
        raise ConfigError(f"{override!r}: {problem}; a value that holds a comma is quoted: {key}='\"A,B\"'")
    return [f"{key.strip()}={each}" for each in texts]


def split_values(text: str) -> list[str]:
    """Return the values of a list that is separated by commas; commas in quotes, brackets and braces separate nothing.

    A value with quotes or brackets is left as it is, for the reader of overrides.
    """
    values, depth, quote = [""], 0, ""
    for char in text:
        is_first = not values[-1].strip()
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (is_first or depth):
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth = max(0, depth - 1)
        elif char == "," and not depth:
            values.append("")
            continue
        values[-1] += char
    return [value.strip() for value in values]


def _folder(recipe: str, name: str, overrides: Sequence[str], settings: Sequence[str]) -> Path:
    """Return the folder of a sweep: the given one, or the configured one, or one under `runs` that the same command
    finds again.
    """
    given = [override.partition("=")[2] for override in overrides if override.startswith(f"{_RUN_DIR}=")]
    if given and len(split_values(given[-1])) > 1:
        raise ConfigError(f"run_dir: got {given[-1]!r}; give one folder, which will contain a folder for each run")
    if given:
        return Path(given[-1]).expanduser()
    is_of_run = is_run(Path(recipe).expanduser())
    configured = None if is_of_run else read_raw(recipe, settings).select(_RUN_DIR)
    return Path(configured or f"runs/{name}-sweep").expanduser()
