"""Labels of a run: name, group, tags and notes, which change nothing about its training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rl_core.errors import RunDirectoryError
from rl_launch.session.directory.atomic_file import write_atomically

SECTION = "logger"
"""Section of the config that has the labels of a new run."""


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
        """The labels among nested plain values: a section of a config, or the contents of `run.json`."""
        texts = {name: str(values.get(name) or "") for name in ("name", "group", "notes")}
        return cls(**texts, tags=tuple(map(str, values.get("tags") or ())))

    def updated(self, values: Mapping[str, Any], changed: Iterable[str]) -> Self:
        """Return these labels with changed ones replaced by other values.

        Args:
            values: As of `read`.
            changed: Keys from the root of a config; those of other sections are ignored.
        """
        names = {f"{SECTION}.{each.name}": each.name for each in fields(self)}
        new = Labels.read(values)
        return replace(self, **{names[key]: getattr(new, names[key]) for key in changed if key in names})

    def as_json(self) -> dict[str, Any]:
        """The labels as `run.json` holds them."""
        return asdict(self)


NO_LABELS = Labels()


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
