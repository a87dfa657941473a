"""A folder for data that is made once and read many times: rows of Parquet files, and tokens.

It belongs to one user: others may neither enter it nor put files into it that a run would read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from rl_core.errors import DataError

_log = logging.getLogger(__name__)

MAX_BYTES = 256 << 30
"""Maximum size of the cache. Above it, files that have long been unused are removed."""

_UNUSED_S = 14 * 24 * 3600.0
"""Seconds without use after which a file may be removed; a run reads its files as long as it lasts."""


def folder() -> Path:
    """Return the folder: `rl/data` in `XDG_CACHE_HOME`, or in `~/.cache`; it may be removed when no run is active."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl" / "data"


def claimed(name: str) -> Path:
    """Return a folder in the cache for files that are not written by `stored`; for this user only.

    Raises:
        DataError: If the cache cannot be written or belongs to another user, with the remedy.
    """
    path = folder() / name
    try:
        _claim(folder())
        _evict_once(folder())
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from error
    return path


def digest(*parts: str | bytes) -> str:
    """Return a name that differs if any part does."""
    whole = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def found(name: str) -> Path | None:
    """Return the file of that name in the cache; None if there is none that this user wrote."""
    path = folder() / name
    try:
        facts = path.lstat()
    except OSError:
        return None
    return path if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() else None


def stored(
    name: str, write: Callable[[IO[bytes]], None], *, is_intact: Callable[[Path], bool] = lambda _path: True
) -> Path:
    """Return the file of that name in the cache. If it cannot be used, `write` makes it; an existing file is complete.

    Args:
        name: Path of the file, relative to the folder of the cache.
        write: Function that writes the content to an open file.
        is_intact: Return whether a file's content can be used; a file that cannot be read cannot.

    Raises:
        DataError: If the folder cannot be written or belongs to another user, with the remedy.
    """
    path = folder() / name
    try:
        _claim(folder())
        if found(name) is not None:
            try:
                is_readable = is_intact(path)
            except OSError:
                is_readable = False
            if is_readable:
                # Set the time of the last access only: the time of the change identifies the content of the file.
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                return path
        _evict_once(folder())
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
        raise _unwritable(error) from error
    return path


def evict(max_bytes: int, unused_s: float) -> int:
    """Remove the files that have been unused for longest until the cache is within a size.

    Args:
        max_bytes: Size to reach.
        unused_s: Seconds without use that a file must have to be removed.

    Returns:
        Number of files removed.
    """
    facts = [(path, path.lstat()) for path in folder().rglob("*") if path.is_file()]
    excess = sum(fact.st_size for _, fact in facts) - max_bytes
    latest = time.time() - unused_s
    num_removed = 0
    used = [(max(fact.st_atime, fact.st_mtime), path, fact.st_size) for path, fact in facts]
    for last_use, path, size in sorted(used, key=lambda item: item[0]):
        if excess <= 0 or last_use > latest:
            break
        path.unlink(missing_ok=True)
        excess -= size
        num_removed += 1
    return num_removed


def _unwritable(error: OSError) -> DataError:
    remedy = "set XDG_CACHE_HOME to a folder with free space"
    return DataError(f"the data cache in {folder()} cannot be written: {error}; {remedy}")


def _claim(path: Path) -> None:
    """Make the folder, for this user only.

    Raises:
        DataError: If it belongs to another user.
    """
    path.mkdir(parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        owner = f"belongs to another user (id {facts.st_uid})"
        raise DataError(f"the data cache in {path} {owner}; set XDG_CACHE_HOME to your own folder")
    if stat.S_IMODE(facts.st_mode) != stat.S_IRWXU:
        path.chmod(stat.S_IRWXU)


@once
def _evict_once(path: Path) -> None:
    """Keep the cache within `MAX_BYTES`, at the first file that this process adds to it."""
    try:
        num_removed = evict(MAX_BYTES, _UNUSED_S)
    except OSError as error:  # Another process may remove files at the same time.
        _log.warning("could not remove old files from the data cache in %s: %s", path, error)
        return
    if num_removed:
        _log.info("removed %d files that were unused for two weeks from the data cache in %s", num_removed, path)
