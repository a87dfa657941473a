"""The files of a user's own code that a config names, as a run directory keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl_core.config import Config, plain
from rl_core.user_code import SourceFile, is_in_file

FOLDER = "code"
"""In a run directory."""


def copies_of(config: Config) -> dict[str, SourceFile]:
    """The files that a resolved config names as `file.py:Name`, by the names of their copies. A file that does not
    exist is left out: its user reports it.
    """
    paths = {value.rpartition(":")[0] for value in _texts(plain(config)) if is_in_file(value)}
    files = [SourceFile.read(path) for path in sorted(paths) if Path(path).is_file()]
    return {_name(file): file for file in files}


def changed_files(folder: Path, copies: dict[str, SourceFile]) -> list[str]:
    """Files that have changed since the run in a folder began, each with its copy and the first line that differs; a
    file that has no copy yet is not among them.
    """
    found = []
    for name, file in copies.items():
        copy = folder / FOLDER / name
        if copy.is_file() and (kept := SourceFile.read(copy).text) != file.text:
            found.append(f"{file.path} differs from its copy {copy} from line {_first_difference(kept, file.text)} on")
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


def _name(file: SourceFile) -> str:
    """A name for the copy of a file; files of the same name may come from several folders."""
    path = Path(file.path)
    return f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}.py"


def _first_difference(old: str, new: str) -> int:
    pairs = zip_longest(old.splitlines(keepends=True), new.splitlines(keepends=True))
    return next(number for number, (before, after) in enumerate(pairs, 1) if before != after)
