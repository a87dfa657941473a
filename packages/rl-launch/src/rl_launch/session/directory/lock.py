"""One process at a time in a run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from rl_core.errors import RunDirectoryError

FILE_NAME = "run.lock"

_CLAIM = "run.lock.claim"
"""Made by the holder where the file system has no locks."""

FILE_NAMES = (FILE_NAME, _CLAIM)
"""Files that do not belong to the contents of a folder."""

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of `flock` that say that another process has the lock; others say that the file system has none."""


class DirectoryLock:
    """Holds a run directory until released or until this process ends, however it ends.

    Where the file system has no locks (some network file systems), the holder is the process that made a file next to
    the lock. A holder that was killed on another host can then not be told from a live one.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._claim = folder / _CLAIM
        self._file: IO[str] | None = None
        self._has_claim = False

    def acquire(self) -> None:
        """Take the lock; one left by a process that has died is taken over.

        Raises:
            RunDirectoryError: If another process has it, naming process and host.
        """
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                file.close()
                raise self._refusal(_read(self._path)) from None
            self._make_claim(file)
        file.seek(0)
        file.truncate()
        file.write(_identity())
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None
        if self._has_claim:
            self._claim.unlink(missing_ok=True)
            self._has_claim = False

    def _make_claim(self, file: IO[str]) -> None:
        try:
            if self._claim.exists() and _has_died(_read(self._claim)):
                # of several processes that find this, one renames the file
                aside = self._claim.with_name(f".{_CLAIM}.{os.getpid()}")
                self._claim.rename(aside)
                aside.unlink()
            claim = self._claim.open("x")
        except (FileExistsError, FileNotFoundError):
            file.close()
            raise self._refusal(_read(self._claim), self._claim) from None
        with claim:
            claim.write(_identity())
        self._has_claim = True

    def _refusal(self, held: dict, claim: Path | None = None) -> RunDirectoryError:
        text = (
            f"{self._path.parent} is in use by {_in_words(held) if held else 'another process'}. "
            "Wait for it or stop it, or choose another run_dir."
        )
        if claim is not None:
            text += f" Its file system has no locks: if that process has ended, remove {claim}."
        return RunDirectoryError(text)


def host_of_holder(folder: Path) -> str | None:
    """Name of the host of the process that has a run directory; None if none has it. Takes no lock."""
    return None if holder(folder) is None else str(_read(folder / FILE_NAME)["host"])


def holder(folder: Path) -> str | None:
    """The process that has a run directory, in words; None if none has it. Takes no lock."""
    held = _read(folder / FILE_NAME)
    if not held:
        return None
    if held["host"] != socket.gethostname():
        return _in_words(held) if _is_locked(folder / FILE_NAME) else None
    return None if _has_died(held) else _in_words(held)


def _identity() -> str:
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": started})


def _has_died(held: dict) -> bool:
    """Return whether the process with this identity was one of this host and has ended."""
    if not held or held["host"] != socket.gethostname():
        return False
    try:
        started = psutil.Process(held["pid"]).create_time()
    except psutil.NoSuchProcess:
        return True
    # a later process may have the number of one that has ended
    return started > datetime.fromisoformat(held["since"]).timestamp() + 1


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _TAKEN or (path.parent / _CLAIM).exists()
        return False


def _in_words(held: dict) -> str:
    return f"process {held['pid']} on {held['host']} since {held['since']}"


def _read(path: Path) -> dict:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and data.keys() >= {"pid", "host", "since"} else {}
