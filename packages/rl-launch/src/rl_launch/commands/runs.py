"""`rl runs`: the runs in a folder, the progress of each, and the command that continues it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_core.errors import RunDirectoryError
from rl_launch.commands.run_values import RunValues, check_keys, ordered
from rl_launch.session.directory.labels import Labels
from rl_launch.session.directory.remedies import command_to_go_on
from rl_launch.session.directory.run_folder import RunFolder, find_runs
from rl_launch.session.directory.run_state import Best
from rl_launch.show.condition import Condition, shown
from rl_launch.show.headings import headings

_STYLES = {"running": "green", "finished": "bold", "interrupted": "yellow", "failed": "red"}
_OF_A_RUN = re.compile(r"(?:.*/)?([^/]+)/checkpoints/(step_\d+)/hf/?")
_MOST_COMMANDS = 5

_log = logging.getLogger(__name__)


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
    """What `rl runs` lists.

    Args:
        keys: Columns, as `RunValues` takes them; none for the usual columns.
        sort: A key to sort by; empty for the most recently changed first.
        conditions: Conditions that all hold for the runs that are listed.
        is_reversed: Whether the last of the order comes first.
    """

    keys: Sequence[str] = ()
    sort: str = ""
    conditions: Sequence[Condition] = ()
    is_reversed: bool = False


def list_runs(folder: Path, listing: Listing = Listing()) -> list[ListedRun]:
    """The runs in a folder. Reads small files and the ends of others, and all metrics if one is asked for.

    Raises:
        RunDirectoryError: If the folder does not exist.
        ConfigError: If no run has a key that is asked for.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"{folder} is not a folder. Pass a folder with runs: rl runs DIR.")
    return listed(find_runs(folder), listing)


def listed(runs: Iterable[RunFolder], listing: Listing = Listing()) -> list[ListedRun]:
    """The runs that meet the conditions of a listing, in its order.

    Raises:
        ConfigError: If no run has a key that is asked for.
    """
    found = [RunValues(run) for run in runs if _is_readable(run)]
    check_keys(found, listing.keys, "--keys")
    check_keys(found, [condition.key for condition in listing.conditions], "--filter")
    check_keys(found, [listing.sort] if listing.sort else [], "--sort")
    found = [values for values in found if all(condition.holds(values) for condition in listing.conditions)]
    if listing.sort:
        found = ordered(found, listing.sort)
    else:
        found.sort(key=lambda values: values.run.changed_at(), reverse=True)
    return [_listed(values, listing.keys) for values in (reversed(found) if listing.is_reversed else found)]


def _is_readable(run: RunFolder) -> bool:
    """Return whether the files of a run can be read; a run whose files cannot is reported in the log."""
    try:
        run.description(), run.state(), run.changed_at()
    except OSError as error:
        _log.warning("%s is left out, because it could not be read: %s", run.path, error)
        return False
    return True


def as_json(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """The object that `rl runs --json` prints."""
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
    console.print(_table_of_values(runs, folder, now) if listing.keys else _table(runs, folder, now))
    ended = [run for run in runs if run.status in ("interrupted", "failed")]
    for run in ended[:_MOST_COMMANDS]:
        reason = f" ({run.reason})" if run.reason else ""
        console.print(
            f"\n{_relative(run.path, folder)} {run.status}{reason}; go on with", highlight=False, markup=False
        )
        console.print(f"  {run.go_on}", highlight=False, markup=False, soft_wrap=True)
    if len(ended) > _MOST_COMMANDS:
        console.print(f"\n{len(ended) - _MOST_COMMANDS} more are unfinished: rl runs --json lists their commands.")


def age(seconds: float) -> str:
    """An age in one unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def short_model(name: str) -> str:
    """A model's name without the folders around it; of a checkpoint, its run and step."""
    if match := _OF_A_RUN.fullmatch(name):
        return f"{match[1]}/{match[2]}"
    return name.rstrip("/").rpartition("/")[2]


def _listed(values: RunValues, keys: Sequence[str]) -> ListedRun:
    run = values.run
    description, state = run.description(), run.state()
    path = os.path.relpath(run.path)
    typed = path if not path.startswith("..") else str(run.path.absolute())
    return ListedRun(
        path=typed,
        algorithm=description.algorithm,
        model=description.model,
        status=state.status,
        reason=state.reason,
        step=state.step,
        max_steps=state.max_steps,
        best=state.best,
        created=description.created,
        changed=run.changed_at().isoformat(timespec="seconds"),
        go_on=command_to_go_on(typed, state),
        labels=description.labels,
        values={key: values[key] for key in keys},
    )


def _table(runs: Sequence[ListedRun], folder: Path, now: datetime) -> Table:
    table = _empty_table()
    table.add_column("algorithm", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    has_tags = any(run.labels.tags for run in runs)
    if has_tags:
        table.add_column("tags", overflow="fold")
    for run in runs:
        table.add_row(
            _relative(run.path, folder),
            run.algorithm,
            short_model(run.model),
            _state(run),
            _step(run),
            f"{run.best.metric} {run.best.value:.4g}" if run.best else "",
            _age(run, now),
            *([shown(list(run.labels.tags))] if has_tags else []),
        )
    return table


def _table_of_values(runs: Sequence[ListedRun], folder: Path, now: datetime) -> Table:
    keys = list(runs[0].values)
    table = _empty_table()
    for key, heading in zip(keys, headings(keys), strict=True):
        numbers = all(isinstance(run.values[key], int | float | None) for run in runs)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    others: dict[str, Callable[[ListedRun], str | Text]] = {
        "state": _state,
        "step": _step,
        "age": lambda run: _age(run, now),
    }
    others = {name: cell for name, cell in others.items() if name not in keys}
    for name in others:
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for run in runs:
        cells = [short_model(str(run.values[key])) if key == "model" else shown(run.values[key]) for key in keys]
        table.add_row(_relative(run.path, folder), *cells, *(cell(run) for cell in others.values()))
    return table


def _empty_table() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True, overflow="fold")  # to be copied; if there is no room, the model wraps
    return table


def _state(run: ListedRun) -> Text:
    return Text(run.status, style=_STYLES[run.status])


def _step(run: ListedRun) -> str:
    return f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step)


def _age(run: ListedRun, now: datetime) -> str:
    return age((now - datetime.fromisoformat(run.changed)).total_seconds())


def _relative(path: str, folder: Path) -> str:
    below = os.path.relpath(path, folder)
    return Path(path).name if below == "." else below
