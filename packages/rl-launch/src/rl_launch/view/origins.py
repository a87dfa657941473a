"""The config of a run by key, with the place at which each value was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_core.config import load
from rl_core.config.tree import format_path, leaves
from rl_core.errors import ConfigError
from rl_launch.session.directory.origins import read_origins
from rl_launch.session.directory.run_folder import CONFIG, RunFolder


@dataclass(frozen=True)
class ConfigValue:
    """A value of a config.

    Args:
        value: The plain value.
        origin: File and line, `command line` or `default` if the run has recorded it; else the place in its
            `config.yaml`.
    """

    value: Any
    origin: str


def config_values(run: RunFolder) -> dict[str, ConfigValue]:
    """Return the values of a run's config by dotted key; empty if its file cannot be read."""
    try:
        raw = load(run.path / CONFIG)
    except ConfigError:
        return {}
    recorded = read_origins(run.path)
    found = {}
    for path, value in leaves(raw.plain()).items():
        key = format_path(path)
        line = raw.entry.origin_at(path).line
        found[key] = ConfigValue(value, recorded.get(key) or (CONFIG if line is None else f"{CONFIG}:{line}"))
    return found
