"""The files of a server of training steps in its run directory: `rl serve tinker` writes, and `rl view` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import RunDirectoryError

TENANTS = "tenants.jsonl"
"""Each line has a time and the numbers of all tenants, after a change of the number of optimizer steps."""

STATUS = "status.json"
"""The newest numbers, replaced as a whole."""


def is_served(folder: Path) -> bool:
    """Return whether a folder is the run directory of a server."""
    return (folder / STATUS).is_file() and (folder / TENANTS).is_file()


def read_status(folder: Path) -> dict[str, Any]:
    """Return the newest numbers of a server: `time`, `base_model`, and `tenants` by name.

    Raises:
        RunDirectoryError: If they cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{folder / STATUS} cannot be read: {error}") from None
    return found


def steps_over_time(folder: Path, most: int) -> list[dict[str, Any]]:
    """Return the time and the optimizer steps of each tenant of some lines, thinned to at most `most` and the last."""
    lines = list(_lines(folder / TENANTS))
    chosen = lines[:: max(1, -(-len(lines) // most))]
    chosen += lines[-1:] if lines and chosen[-1] is not lines[-1] else []
    return [
        {"time": line["time"], "steps": {name: each["steps"] for name, each in line["tenants"].items()}}
        for line in chosen
    ]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # The last line may be half written.
                    yield json.loads(line)
    except OSError:
        return
