"""Where each value of a run's config comes from: `origins.json` of a run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rl_launch.session.directory.atomic_file import write_atomically

FILE_NAME = "origins.json"


def write_origins(folder: Path, origins: Mapping[str, str]) -> None:
    """Write the origins of a config into a run directory, atomically.

    A run that is resumed from its own folder was given most values by its `config.yaml`. These keep the origin that was
    recorded first.

    Args:
        folder: The run directory.
        origins: File and line, `command line` or `default`, by dotted key.
    """
    earlier = read_origins(folder)
    own = f"{folder / 'config.yaml'}:"
    found = {key: earlier.get(key, origin) if origin.startswith(own) else origin for key, origin in origins.items()}
    write_atomically(folder / FILE_NAME, json.dumps(found, indent=1) + "\n")


def read_origins(folder: Path) -> dict[str, str]:
    """Return the origins in a run directory; empty if there are none that can be read."""
    try:
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(origin) for key, origin in data.items()} if isinstance(data, dict) else {}
