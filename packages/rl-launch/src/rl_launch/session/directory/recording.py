"""Keeping a run's config in its directory, and reading it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rl_core.config import Config, RuledChange, changed_keys, load, resolve, with_absolute_paths


class Recording(Protocol):
    """Decides which part of a config a run directory keeps."""

    def used(self, config: Any, tree: dict[str, Any]) -> dict[str, Any]:
        """The part of a config that a run uses.

        Args:
            config: Typed config of the run.
            tree: The same config as nested plain values.
        """
        ...

    def read(self, path: Path, like: Config) -> Config:
        """The typed config in a `config.yaml`.

        Args:
            path: Path of the `config.yaml`.
            like: The config of the run that resumes.

        Raises:
            ConfigError: If it does not fit what is installed.
        """
        ...


class WholeConfig:
    """Keeps all of a config, which is read as the same type."""

    def used(self, config: Any, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree."""
        return tree

    def read(self, path: Path, like: Config) -> Config:
        """The config in the file, of the same type."""
        return resolve(load(path), type(like)).config


def kept(config: Config, recording: Recording) -> dict[str, Any]:
    """The part of a config that a run directory keeps, as nested plain values."""
    return recording.used(config, with_absolute_paths(config))


def changes_since(path: Path, config: Config, recording: Recording) -> list[RuledChange]:
    """The keys in which a config differs from the one that a run directory keeps.

    Raises:
        ConfigError: If that one does not fit what is installed.
    """
    earlier = recording.read(path, config)
    return changed_keys(type(config), kept(earlier, recording), kept(config, recording))
