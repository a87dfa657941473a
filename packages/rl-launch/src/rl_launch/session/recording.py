"""How a run's config is kept in its directory, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rl_core.config import Config, RuledChange, changed_keys, load, resolve, with_absolute_paths


class Recording(Protocol):
    """Decides what a run directory keeps of a config."""

    def used(self, config: Any, tree: dict[str, Any]) -> dict[str, Any]:
        """The part of a config that a run uses.

        Args:
            tree: the config as nested plain values.
        """
        ...

    def read(self, path: Path, like: Config) -> Config:
        """The typed config in a `config.yaml`.

        Args:
            like: the config of the run that is to go on with it.

        Raises:
            ConfigError: if it does not fit what is installed.
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
    """What a run directory keeps of a config, as nested plain values."""
    return recording.used(config, with_absolute_paths(config))


def changes_since(path: Path, config: Config, recording: Recording) -> list[RuledChange]:
    """The keys in which a config differs from the one that a run directory keeps.

    Raises:
        ConfigError: if that one does not fit what is installed.
    """
    earlier = recording.read(path, config)
    return changed_keys(type(config), kept(earlier, recording), kept(config, recording))
