"""A folder for what is made of data once and read many times: rows of Parquet files, and tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from rl_core.errors import DataError


def folder() -> Path:
    """The folder: `rl/data` in `XDG_CACHE_HOME`, or in `~/.cache`; it may be removed when no run is active."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl" / "data"


def digest(*parts: str | bytes) -> str:
    """A name that differs if any part does."""
    whole = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def stored(name: str, write: Callable[[IO[bytes]], None]) -> Path:
    """The file of that name in the cache. If it does not exist, `write` fills it; a file that exists is complete.

    Raises:
        DataError: if the folder cannot be written, with the remedy.
    """
    path = folder() / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                write(file)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise DataError(
            f"the cache of data in {folder()} cannot be written: {error}; set XDG_CACHE_HOME to a folder with room"
        ) from error
    return path
