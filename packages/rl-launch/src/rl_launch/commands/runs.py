"""`rl runs`: the runs in a folder, the progress of each, and the command that continues it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_core.errors import RunDirectoryError
from rl_launch.session.remedies import command_to_go_on
from rl_launch.session.run_folder import RunFolder, find_runs
from rl_launch.session.run_state import Best

_STYLES = {"running": "green", "finished": "bold", "interrupted": "yellow", "failed": "red"}
_OF_A_RUN = re.compile(r"(?:.*/)?([^/]+)/checkpoints/(step_\d+)/hf/?")
_MOST_COMMANDS = 5


@dataclass(frozen=True)
class ListedRun:
    """A run as `rl runs` lists it.

    Args:
        path: of its folder, as the user would type it.
        status: `running`, `finished`, `interrupted` or `failed`.
        reason: why it ended.
        step: the last complete step.
        max_steps: 0 if unknown.
        changed: time of the last write, in ISO format.
        go_on: the command that continues it; empty while it runs.
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


def list_runs(folder: Path) -> list[ListedRun]:
    """The runs in a folder, the most recently changed first. Reads small files and the ends of others.

    Raises:
        RunDirectoryError: if the folder does not exist.
    """
    if not folder.is_dir():
        raise RunDirectoryError(f"{folder} is not a folder. Give a folder that holds runs: rl runs DIR.")
    return sorted(map(_listed, find_runs(folder)), key=lambda run: run.changed, reverse=True)


def as_json(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """The object that `rl runs --json` prints."""
    return {"schema": 1, "runs": [asdict(run) for run in runs]}


def show(runs: Sequence[ListedRun], folder: Path, console: Console, *, now: datetime) -> None:
    """Print a table, and the commands that continue unfinished runs."""
    if not runs:
        text = f"{folder} holds no runs. rl train RECIPE starts one under runs/."
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True, overflow="fold")  # to be copied; if there is no room, the model wraps
    table.add_column("algorithm", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            _relative(run.path, folder),
            run.algorithm,
            short_model(run.model),
            Text(run.status, style=_STYLES[run.status]),
            f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step),
            f"{run.best.metric} {run.best.value:.4g}" if run.best else "",
            age((now - datetime.fromisoformat(run.changed)).total_seconds()),
        )
    console.print(table)
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


def _listed(run: RunFolder) -> ListedRun:
    description, state = run.description(), run.state()
    path = os.path.relpath(run.path)
    shown = path if not path.startswith("..") else str(run.path.absolute())
    return ListedRun(
        path=shown,
        algorithm=description.algorithm,
        model=description.model,
        status=state.status,
        reason=state.reason,
        step=state.step,
        max_steps=state.max_steps,
        best=state.best,
        created=description.created,
        changed=run.changed_at().isoformat(timespec="seconds"),
        go_on=command_to_go_on(shown, state),
    )


def _relative(path: str, folder: Path) -> str:
    below = os.path.relpath(path, folder)
    return Path(path).name if below == "." else below
