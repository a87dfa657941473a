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


class DirectoryLock:
    """Holds a run directory until released or until this process ends, however it ends.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock; one left by a process that has died is taken over.

        Raises:
            RunDirectoryError: if another process has it, naming process and host.
        """
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not self._is_free(error):
                file.close()
                raise RunDirectoryError(
                    f"{self._path.parent} is in use by {self._holder()}. "
                    "Wait for it or stop it, or choose another run_dir."
                ) from None
        file.seek(0)
        file.truncate()
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": started}, file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def _is_free(self, error: OSError) -> bool:
        """Whether the file system has no locks, and the process named in the file is gone."""
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        holder = _read(self._path)
        return not holder or (holder["host"] == socket.gethostname() and not psutil.pid_exists(holder["pid"]))

    def _holder(self) -> str:
        holder = _read(self._path)
        return _in_words(holder) if holder else "another process"


def holder(folder: Path) -> str | None:
    """The process that has a run directory, in words; None if none has it. Takes no lock."""
    held = _read(folder / FILE_NAME)
    if not held:
        return None
    if held["host"] != socket.gethostname():
        return _in_words(held) if _is_locked(folder / FILE_NAME) else None
    try:
        started = psutil.Process(held["pid"]).create_time()
    except psutil.NoSuchProcess:
        return None
    # a later process may have the number of one that has ended
    return _in_words(held) if started <= datetime.fromisoformat(held["since"]).timestamp() + 1 else None


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return False


def _in_words(held: dict) -> str:
    return f"process {held['pid']} on {held['host']} since {held['since']}"


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
