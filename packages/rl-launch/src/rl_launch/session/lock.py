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
            RunDirectoryError: where another process has it, naming process and host.
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
        """Let others in."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def _is_free(self, error: OSError) -> bool:
        """Whether a file system without locks leaves the decision to the name in the file, and that process is gone."""
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        holder = self._read()
        return not holder or (holder["host"] == socket.gethostname() and not psutil.pid_exists(holder["pid"]))

    def _holder(self) -> str:
        holder = self._read()
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}" if holder else "another process"

    def _read(self) -> dict:
        try:
            return json.loads(self._path.read_text())
        except (OSError, json.JSONDecodeError):
            return {}
