"""Checks of engines that found no problem, remembered between runs.

A check imports its engine, which takes seconds of processor time. Its answer follows from the section of the config,
the files that this names, the environment and the machine. A record is an empty file, named by the digest of all four.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_core.config import Config, plain
from rl_launch.worker_envs.node_build import default_root
from rl_launch.worker_envs.variables import OF_THE_MACHINE

_KEPT_S = 30 * 24 * 3600.0
_TEXTS = (".json", ".jinja", ".txt", ".yaml", ".yml", ".py")
"""Ends of the names of files whose contents count; of others, such as weights, the size does."""
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


class PassedChecks:
    """Remembers which checks passed.

    Args:
        folder: Of the records, which is made when the first one is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_root().parent / "checks"

    def has(self, record: str) -> bool:
        """Return whether this user wrote a record that is recent enough."""
        try:
            facts = (self._folder / record).lstat()
        except OSError:
            return False
        return facts.st_uid == os.geteuid() and time.time() - facts.st_mtime < _KEPT_S

    def add(self, record: str) -> None:
        """Write a record; where it cannot be written, the check is made again next time."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._folder.iterdir():
                if time.time() - old.lstat().st_mtime >= _KEPT_S:
                    old.unlink(missing_ok=True)
            (self._folder / record).touch()
        except OSError:
            pass


def record_of(python: str, check: str, section: Config, variables: Mapping[str, str]) -> str:
    """Return the name of the record of a check.

    Args:
        python: Interpreter of the worker's environment.
        check: `"package.module:function"`.
        section: Section of a resolved config. Folders and files that it names count by their contents, so that a model
            that was moved is the same model.
        variables: Environment variables of the check's process that differ from the driver's. Those that describe the
            machine do not count.
    """
    whole = hashlib.blake2b(digest_size=20)
    for part in (
        check,
        json.dumps(_by_content(plain(section)), sort_keys=True),
        json.dumps(sorted(item for item in variables.items() if item[0] not in OF_THE_MACHINE)),
        platform.node(),
        *(path.read_text() for path in map(Path, _DRIVERS) if path.is_file()),
        *_environment(python),
    ):
        whole.update(part.encode() + b"\0")
    return whole.hexdigest()


def _by_content(value: Any) -> Any:
    """Plain values, with the digest of what a folder or file holds in place of its name."""
    if isinstance(value, dict):
        return {key: _by_content(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_by_content(each) for each in value]
    if isinstance(value, str) and os.sep in value:
        path = Path(value).expanduser()
        files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
        if files:
            return [(file.name, _content(file)) for file in files]
    return value


def _content(path: Path) -> str:
    facts = path.stat()
    if path.is_file() and path.suffix in _TEXTS:
        return hashlib.blake2b(path.read_bytes(), digest_size=20).hexdigest()
    return str(facts.st_size)


def _environment(python: str) -> Iterator[str]:
    """What an environment holds: its interpreter, its distributions, and the sources that it imports in place."""
    yield python
    yield str(Path(python).resolve())
    for site in sorted(Path(python).parent.parent.glob("lib/python*/site-packages")):
        for entry in sorted(site.iterdir()):
            if entry.suffix in (".dist-info", ".pth"):
                yield f"{entry.name} {entry.stat().st_mtime_ns}"
            if entry.suffix == ".pth":
                yield from _sources(entry.read_text(encoding="utf-8").splitlines())
    yield from _sources(os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _sources(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        if folder.startswith(os.sep) and Path(folder).is_dir():
            for file in sorted(each for each in Path(folder).rglob("*.py*") if each.suffix in (".py", ".pyi")):
                facts = file.stat()
                yield f"{file} {facts.st_size} {facts.st_mtime_ns}"
