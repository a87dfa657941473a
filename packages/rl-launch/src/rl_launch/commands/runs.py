"""`rl runs`: the runs in a folder by the values of their keys, and the command that continues each."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_core.config import did_you_mean
from rl_core.config.keys import value_at
from rl_core.config.tree import format_path, leaves, parse_path
from rl_core.errors import ConfigError, RunDirectoryError
from rl_launch.run_session.directory.remedies import command_to_go_on
from rl_launch.run_session.directory.run_folder import RunFolder, find_runs
from rl_launch.run_session.directory.run_state import Best, Labels
from rl_launch.show.report import MetricSummary, headings, higher_is_better, series_of, summaries_of
from rl_launch.show.selection import Condition, shown

_STYLES = {"running": "green", "finished": "bold", "interrupted": "yellow", "failed": "red"}
_COLUMNS: Mapping[str, Any] = {
    "algorithm": {"no_wrap": True},
    "model": {"overflow": "fold"},
    "state": {"no_wrap": True},
    "step": {"justify": "right", "no_wrap": True},
    "best": {"no_wrap": True},
    "age": {"justify": "right", "no_wrap": True},
    "tags": {"overflow": "fold"},
}
_OF_A_RUN = re.compile(r"(?:.*/)?([^/]+)/checkpoints/(step_\d+)/hf/?")
_MAX_COMMANDS = 5
_BEST = ":best"

_log = logging.getLogger(__name__)


class RunValues:
    """Values of one run by key. Each of its files is read when a key first needs it.

    A key is one of `FIELDS`, a metric as `metrics.jsonl` spells it (`val/loss`: its last value, `val/loss:best`: its
    best), or the dotted key of a config (`policy.optimizer.kwargs.lr`).
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key; None if the run does not have it."""
        if key in FIELDS:
            return FIELDS[key](self)
        if "/" in key:
            summary = self._summaries.get(key.removesuffix(_BEST))
            return None if summary is None else summary.best if key.endswith(_BEST) else summary.last
        return value_at(self.config, parse_path(key))

    def has(self, key: str) -> bool:
        """Return whether the run has a key, which may be null."""
        if key in FIELDS or self[key] is not None:
            return True
        *around, last = parse_path(key)
        section = value_at(self.config, tuple(around))
        return isinstance(section, dict) and last in section

    @property
    def keys(self) -> list[str]:
        """Every key of the run."""
        return [*FIELDS, *self._summaries, *map(format_path, leaves(self.config))]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's config as nested plain values."""
        return self.run.config()

    @cached_property
    def _summaries(self) -> dict[str, MetricSummary]:
        return {summary.name: summary for summary in summaries_of(series_of(self.run.metrics()))}


FIELDS: dict[str, Callable[[RunValues], Any]] = {
    "state": lambda values: values.run.state().status,
    "step": lambda values: values.run.state().step,
    "algorithm": lambda values: values.run.description().algorithm,
    "model": lambda values: values.run.description().model,
    "name": lambda values: values.run.description().labels.name or values.run.path.name,
    "group": lambda values: values.run.description().labels.group,
    "tags": lambda values: list(values.run.description().labels.tags),
    "notes": lambda values: values.run.description().labels.notes,
}
"""Keys in addition to the keys of the config and the metrics."""


@dataclass(frozen=True)
class ListedRun:
    """A run as `rl runs` lists it.

    Args:
        path: Path of its folder, as the user would type it.
        status: `running`, `finished`, `interrupted` or `failed`.
        reason: Why it ended.
        step: The last complete step.
        max_steps: 0 if unknown.
        changed: Time of the last write, in ISO format.
        go_on: The command that continues it; empty while it runs.
        labels: Name, group, tags and notes.
        values: Values of the requested keys; None for a missing key.
    """

    path: str
    algorithm: str
    model: str
    status: str
    reason: str
    step: int
    max_steps: int
    best: Best | None
    created: str
    changed: str
    go_on: str
    labels: Labels = field(default_factory=Labels)
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """The request of `rl runs`.

    Args:
        keys: Columns, as `RunValues` takes them; none for the usual columns.
        sort: A key to sort by; empty for the most recently changed first.
        conditions: Conditions that all hold for the runs that are listed.
        is_reversed: Whether the last of the order comes first.
        is_sweep: True for the runs of one sweep, which its command continues.
    """

    keys: Sequence[str] = ()
    sort: str = ""
    conditions: Sequence[Condition] = ()
    is_reversed: bool = False
    is_sweep: bool = False


def condition(text: str) -> Condition:
    """Read a condition on a run, such as `state=finished`, `tag=baseline` or `sft.seed<3`.

    Raises:
        ConfigError: If it is not one.
    """
    found = Condition.parse(text, "--filter", "state=finished, tag=NAME or sft.seed=1")
    return replace(found, key="tags") if found.key == "tag" else found


def list_runs(folder: Path, listing: Listing = Listing()) -> list[ListedRun]:
    """List the runs in a folder. Reads small files and the ends of others, and all metrics if one is requested.

    Raises:
        RunDirectoryError: If the folder does not exist.
        ConfigError: If no run has a requested key.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"{folder} is not a folder. Pass a folder with runs: rl runs DIR.")
    return listed(find_runs(folder), listing)


def listed(runs: Iterable[RunFolder], listing: Listing = Listing()) -> list[ListedRun]:
    """List the runs that meet the conditions of a listing, in its order.

    Raises:
        ConfigError: If no run has a requested key.
    """
    found = []
    for run in runs:
        try:
            run.description(), run.state(), run.changed_at()
            found.append(RunValues(run))
        except OSError as error:
            _log.warning("%s is left out, because it could not be read: %s", run.path, error)
    _check_keys(found, listing.keys, "--keys")
    _check_keys(found, [each.key for each in listing.conditions], "--filter")
    _check_keys(found, [listing.sort] if listing.sort else [], "--sort")
    found = [values for values in found if all(each.holds(values) for each in listing.conditions)]
    if listing.sort:
        found.sort(key=lambda values: _rank(values[listing.sort], listing.sort))
    else:
        found.sort(key=lambda values: values.run.changed_at(), reverse=True)
    return [_listed(values, listing.keys) for values in (reversed(found) if listing.is_reversed else found)]


def _rank(value: Any, key: str) -> tuple[int, float, str]:
    """Return a key that sorts ascending, or the best first for a metric whose higher values are better. Runs that do
    not have the key come last."""
    if value is None:
        return 2, 0.0, ""
    if isinstance(value, int | float):
        return 0, -value if "/" in key and higher_is_better(key.removesuffix(_BEST)) else value, ""
    return 1, 0.0, str(value)


def _check_keys(runs: Sequence[RunValues], keys: Sequence[str], option: str) -> None:
    """Refuse keys that no run has; nothing is known about keys if there are no runs.

    Raises:
        ConfigError: With the nearest keys.
    """
    for key in keys:
        if runs and not any(values.has(key) for values in runs):
            known = dict.fromkeys(key for values in runs for key in values.keys)
            raise ConfigError(
                f"{option}: none of these runs has {key!r}{did_you_mean(key, known)} A key of the config "
                f"(sft.seed), a metric (val/loss, val/loss:best) or one of {', '.join(FIELDS)} is allowed."
            )


def as_json(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Return the object that `rl runs --json` prints."""
    return {"schema": 1, "runs": [asdict(run) for run in runs]}


def show(
    runs: Sequence[ListedRun], folder: Path, console: Console, *, now: datetime, listing: Listing = Listing()
) -> None:
    """Print a table, and the commands that continue unfinished runs."""
    if not runs:
        text = f"{folder} does not contain runs. To start one under runs/, use rl train RECIPE."
        if listing.conditions:
            text = f"No run in {folder} matches {' and '.join(map(str, listing.conditions))}."
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    console.print(_table(runs, folder, now))
    ended = [run for run in runs if run.status in ("interrupted", "failed")]
    for run in ended[:_MAX_COMMANDS]:
        reason = f" ({run.reason})" if run.reason else ""
        further = "" if listing.is_sweep else "; go on with"
        console.print(f"\n{_relative(run.path, folder)} {run.status}{reason}{further}", highlight=False, markup=False)
        if not listing.is_sweep:
            console.print(f"  {run.go_on}", highlight=False, markup=False, soft_wrap=True)
    if ended and listing.is_sweep:
        console.print("\nTo go on, run the same command again.", highlight=False, markup=False)
    if len(ended) > _MAX_COMMANDS:
        console.print(f"\n{len(ended) - _MAX_COMMANDS} more are unfinished: rl runs --json lists their commands.")


def age(seconds: float) -> str:
    """Return an age in one unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def short_model(name: str) -> str:
    """Return a model's name without the folders around it; for a checkpoint, its run and step."""
    if match := _OF_A_RUN.fullmatch(name):
        return f"{match[1]}/{match[2]}"
    return name.rstrip("/").rpartition("/")[2]


def _listed(values: RunValues, keys: Sequence[str]) -> ListedRun:
    run = values.run
    description, state = run.description(), run.state()
    path = os.path.relpath(run.path)
    typed = path if not path.startswith("..") else str(run.path.absolute())
    return ListedRun(
        typed,
        description.algorithm,
        description.model,
        state.status,
        state.reason,
        state.step,
        state.max_steps,
        state.best,
        created=description.created,
        changed=run.changed_at().isoformat(timespec="seconds"),
        go_on=command_to_go_on(typed, state),
        labels=description.labels,
        values={key: values[key] for key in keys},
    )


def _table(runs: Sequence[ListedRun], folder: Path, now: datetime) -> Table:
    keys = list(runs[0].values)
    usual = [name for name in _COLUMNS if name != "tags" or any(run.labels.tags for run in runs)]
    others = [name for name in ("state", "step", "age") if name not in keys] if keys else usual
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True, overflow="fold")  # users copy it; if there is no room, the model wraps
    for key, heading in zip(keys, headings(keys), strict=True):
        numbers = all(isinstance(run.values[key], int | float | None) for run in runs)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for name in others:
        table.add_column(name, **_COLUMNS[name])
    for run in runs:
        seconds = (now - datetime.fromisoformat(run.changed)).total_seconds()
        cells: dict[str, str | Text] = {
            "algorithm": run.algorithm,
            "model": short_model(run.model),
            "state": Text(run.status, style=_STYLES[run.status]),
            "step": f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step),
            "best": f"{run.best.metric} {run.best.value:.4g}" if run.best else "",
            "age": age(seconds),
            "tags": shown(list(run.labels.tags)),
        }
        cells |= {key: short_model(str(value)) if key == "model" else shown(value) for key, value in run.values.items()}
        table.add_row(_relative(run.path, folder), *(cells[name] for name in (*keys, *others)))
    return table


def _relative(path: str, folder: Path) -> str:
    below = os.path.relpath(path, folder)
    return Path(path).name if below == "." else below
