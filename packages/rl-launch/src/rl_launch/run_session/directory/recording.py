"""A run's config in its directory, with the origins of its values and copies of the user's own code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from rl_core.config import Config, RawConfig, RuledChange, changed_keys, load, plain, resolve, with_absolute_paths
from rl_core.config.tree import format_path, leaves
from rl_core.user_code import SourceFile, is_in_file
from rl_launch.run_session.directory.run_folder import CONFIG
from rl_launch.run_session.directory.writable import write_atomically

ORIGINS = "origins.json"


CODE = "code"
"""In a run directory."""


def write_origins(folder: Path, given: RawConfig) -> None:
    """Write the origin of every key in a run's `config.yaml`, atomically: file and line, `command line` or `default`.

    A run that is resumed from its own folder is given most values by its `config.yaml`. These keep the origin that was
    recorded first.

    Args:
        folder: The run directory.
        given: Values that the user wrote.
    """
    earlier, config = read_origins(folder), (folder / CONFIG).resolve()
    found = {}
    for path in leaves(load(folder / CONFIG).plain()):
        key, origin = format_path(path), given.entry.origin_at(path)
        is_own = origin.line is not None and Path(origin.source).expanduser().resolve() == config
        found[key] = earlier.get(key, "default") if is_own else str(origin)
    write_atomically(folder / ORIGINS, json.dumps(found, indent=1) + "\n")


def read_origins(folder: Path) -> dict[str, str]:
    """Return the origins in a run directory by dotted key; empty if there are none that can be read."""
    try:
        data = json.loads((folder / ORIGINS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(origin) for key, origin in data.items()} if isinstance(data, dict) else {}


def copies_of(config: Config) -> dict[str, SourceFile]:
    """Return the files that a resolved config refers to as `file.py:Name`, by the names of their copies. A file that
    does not exist is left out: the code that uses it reports it."""
    paths = {value.rpartition(":")[0] for value in _texts(plain(config)) if is_in_file(value)}
    files = [SourceFile.read(path) for path in sorted(paths) if Path(path).is_file()]
    # files of the same name may come from several folders
    digests = [hashlib.sha256(str(Path(file.path)).encode()).hexdigest()[:8] for file in files]
    return {f"{Path(file.path).stem}-{digest}.py": file for file, digest in zip(files, digests, strict=True)}


def changed_files(folder: Path, copies: dict[str, SourceFile]) -> list[str]:
    """Return the files that have changed since the run in a folder began, each with its copy and the first line that
    differs; a file that has no copy yet is not among them."""
    found = []
    for name, file in copies.items():
        copy = folder / CODE / name
        if copy.is_file() and (kept := SourceFile.read(copy).text) != file.text:
            pairs = zip_longest(kept.splitlines(keepends=True), file.text.splitlines(keepends=True))
            line = next(number for number, (before, after) in enumerate(pairs, 1) if before != after)
            found.append(f"{file.path} differs from its copy {copy} from line {line} on")
    return found


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)


class Recording(Protocol):
    """Decides which part of a config a run directory keeps."""

    def used(self, config: Any, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a config that a run uses.

        Args:
            config: Typed config of the run.
            tree: The same config as nested plain values.
        """

    def read(self, path: Path, like: Config) -> Config:
        """Return the typed config in a `config.yaml`.

        Args:
            path: Path of the `config.yaml`.
            like: The config of the run that resumes.

        Raises:
            ConfigError: If it does not fit what is installed.
        """


class WholeConfig:
    """Keeps all of a config, which is read as the same type."""

    def used(self, config: Any, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the whole tree."""
        return tree

    def read(self, path: Path, like: Config) -> Config:
        """Return the config in the file, of the same type."""
        return resolve(load(path), type(like)).config


def kept(config: Config, recording: Recording) -> dict[str, Any]:
    """Return the part of a config that a run directory keeps, as nested plain values."""
    return recording.used(config, with_absolute_paths(config))


def changes_since(path: Path, config: Config, recording: Recording) -> list[RuledChange]:
    """Return the keys whose values differ between a config and the one that a run directory keeps.

    Raises:
        ConfigError: If that one does not fit what is installed.
    """
    earlier = recording.read(path, config)
    return changed_keys(type(config), kept(earlier, recording), kept(config, recording))
