"""Where each value of a run's config comes from: `origins.json` of a run directory."""

from __future__ import annotations

import json
from pathlib import Path

from rl_core.config import RawConfig, load
from rl_core.config.tree import format_path, leaves
from rl_launch.session.directory.atomic_file import write_atomically
from rl_launch.session.directory.run_folder import CONFIG

FILE_NAME = "origins.json"


def write_origins(folder: Path, given: RawConfig) -> None:
    """Write the origin of every key in a run's `config.yaml`, atomically: file and line, `command line` or `default`.

    A run that is resumed from its own folder is given most values by its `config.yaml`. These keep the origin that was
    recorded first.

    Args:
        folder: The run directory.
        given: What the user wrote.
    """
    earlier, config = read_origins(folder), (folder / CONFIG).resolve()
    found = {}
    for path in leaves(load(folder / CONFIG).plain()):
        key, origin = format_path(path), given.entry.origin_at(path)
        is_own = origin.line is not None and Path(origin.source).expanduser().resolve() == config
        found[key] = earlier.get(key, "default") if is_own else str(origin)
    write_atomically(folder / FILE_NAME, json.dumps(found, indent=1) + "\n")


def read_origins(folder: Path) -> dict[str, str]:
    """Return the origins in a run directory by dotted key; empty if there are none that can be read."""
    try:
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(origin) for key, origin in data.items()} if isinstance(data, dict) else {}
