"""The state of a run (`state.json` of its directory), and its labels (in `run.json`)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from rl_core.errors import MISSING_FILE, RunDirectoryError, named
from rl_launch.run_session.directory.writable import write_atomically

SECTION = "logger"
"""Section of the config that has the labels of a new run."""


FILE_NAME = "state.json"

_log = logging.getLogger(__name__)

Status = Literal["running", "finished", "interrupted", "failed"]

HEADLINES = {"val/accuracy": True, "val/reward": True, "val/loss": False, "reward/mean": True, "train/loss": False}
"""Metrics that measure the quality of a run, in order of preference, and whether higher is better."""


@dataclass(frozen=True)
class Labels:
    """Labels of a run, which `rl runs` lists and trackers are given.

    Args:
        name: Name in trackers; empty for the name of the folder.
        group: Group of runs that belong together; empty for none.
        tags: Words to filter by.
        notes: Free text.
    """

    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the labels among nested plain values: a section of a config, or the contents of `run.json`."""
        texts = {name: str(values.get(name) or "") for name in ("name", "group", "notes")}
        return cls(**texts, tags=tuple(map(str, values.get("tags") or ())))

    def updated(self, values: Mapping[str, Any], changed: Iterable[str]) -> Self:
        """Return these labels with changed ones replaced by other values.

        Args:
            values: As of `read`.
            changed: Keys from the root of a config; keys of other sections are ignored.
        """
        names = {f"{SECTION}.{each.name}": each.name for each in fields(self)}
        new = Labels.read(values)
        return replace(self, **{names[key]: getattr(new, names[key]) for key in changed if key in names})

    def as_json(self) -> dict[str, Any]:
        """Return the labels as `run.json` holds them."""
        return asdict(self)


def write_labels(path: Path, labels: Labels) -> None:
    """Replace the labels in a `run.json`, and keep its modification time, because the age of a run is the age of its
    last step.

    Raises:
        RunDirectoryError: If the file cannot be read or written.
    """
    try:
        times = path.stat()
        description = json.loads(path.read_text(encoding="utf-8"))
        write_atomically(path, json.dumps({**description, **labels.as_json()}, indent=2) + "\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    except (OSError, ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path}: labels cannot be written: {error}") from None


@dataclass(frozen=True)
class Best:
    """The best value of a metric.

    Args:
        metric: As `metrics.jsonl` spells it.
        value: Finite.
        step: Step that recorded it.
    """

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    Args:
        status: `running`; `finished` if all steps are made or the goal is met; `interrupted` if it was asked to end or
            its process has ended, `failed` if an error ended it. The same command resumes the last two.
        step: The last complete step.
        max_steps: Maximum number of steps of the run; 0 before it is known.
        reason: Why it ended; empty if all steps are made.
        goals: Keys that decide when the run is finished, with their values.
        best: None before anything was recorded.
        saved: Step of the last checkpoint that was saved, or that a branch started from; 0 before there is one, None if
            the version that wrote this did not record it.
        at: When this was written, in ISO format with the time zone.
    """

    status: Status
    step: int = 0
    max_steps: int = 0
    reason: str = ""
    goals: Mapping[str, Any] = field(default_factory=dict, repr=False)
    best: Best | None = None
    saved: int | None = field(default=None, repr=False)
    at: str = field(default="", repr=False)

    def write(self, folder: Path) -> None:
        """Write it into a run directory, atomically. A file that cannot be written is reported and costs nothing."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            write_atomically(folder / FILE_NAME, json.dumps({**asdict(self), "at": now}, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s was not written: %s", folder / FILE_NAME, error)

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """Return the state in a run directory; None if there is none, or it is damaged."""
        try:
            with named(folder / FILE_NAME):
                data = json.loads((folder / FILE_NAME).read_bytes())
            best = Best(**data.pop("best")) if data.get("best") else data.pop("best", None)
            return cls(**data, best=best)
        except (*MISSING_FILE, ValueError, TypeError, AttributeError):
            return None


class BestSoFar:
    """The best value of the metric that ranks checkpoints, or else of the first headline that the run records.

    Args:
        metric: Metric that ranks checkpoints; None if none was chosen.
        higher_is_better: True if a higher value of that metric is better.
    """

    def __init__(self, metric: str | None, *, higher_is_better: bool = True) -> None:
        self._ranked = [(metric, higher_is_better)] if metric else list(HEADLINES.items())
        self._found: dict[str, Best] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a step."""
        for name, higher in self._ranked:
            value, known = metrics.get(name), self._found.get(name)
            if value is None or not abs(value) < float("inf"):
                continue
            if known is None or (value > known.value if higher else value < known.value):
                self._found[name] = Best(name, float(value), step)

    @property
    def best(self) -> Best | None:
        """The best value; None before one of the metrics was recorded."""
        return next((self._found[name] for name, _ in self._ranked if name in self._found), None)
