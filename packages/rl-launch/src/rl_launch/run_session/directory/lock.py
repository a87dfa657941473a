"""One process at a time in a run directory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal
from uuid import uuid4

from rl_core.errors import RunDirectoryError

FILE_NAME = "run.lock"

_CLAIM = "run.lock.claim"
"""Made by the holder where the file system has no locks."""


_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of `flock` that say that another process has the lock; others say that the file system has none."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of `link` on file systems without hard links."""

Verdict = Literal["alive", "dead", "unknown"]


class DirectoryLock:
    """Holds a run directory until released or until this process ends, however it ends.

    Where the file system has no locks (some network file systems), the holder is the process that made a file next to
    the lock. Whether a holder has died can only be determined by processes of the same start of the machine and the
    same namespaces; another starter is refused with the remedy.

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
        file, identity = self._path.open("a+"), _identity()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = error.errno in _TAKEN
            if is_taken or not _take(self._claim, identity):
                file.close()
                claim = None if is_taken else self._claim
                held = _read(claim or self._path)
                text = (
                    f"{self._path.parent} is in use by {_in_words(held) if held else 'another process'}. "
                    "Wait for it or stop it, or choose another run_dir."
                )
                if claim is not None:
                    text += f" Its file system has no locks: if that process has ended, remove {claim}."
                raise RunDirectoryError(text) from None
            self._has_claim = True
        file.seek(0)
        file.truncate()
        file.write(identity)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock. A failing disk keeps the files: they name a process that has ended."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)
            with suppress(OSError):
                self._file.close()
            self._file = None
        if self._has_claim:
            with suppress(OSError):
                self._claim.unlink()
            self._has_claim = False


def is_own(name: str) -> bool:
    """Return whether a file does not belong to the contents of a folder, because it is part of its lock."""
    return name.startswith(FILE_NAME)


def host_of_holder(folder: Path) -> str | None:
    """Name of the host of the process that has a run directory; None if none has it. Takes no lock."""
    return None if holder(folder) is None else str(_read(folder / FILE_NAME)["host"])


def holder(folder: Path) -> str | None:
    """Return the process that has a run directory, in words; None if none has it. Takes no lock."""
    held = _read(folder / FILE_NAME)
    if not held:
        return None
    verdict = _verdict(held)
    is_held = _is_locked(folder / FILE_NAME) if verdict == "unknown" else verdict == "alive"
    return _in_words(held) if is_held else None


def _take(path: Path, identity: str) -> bool:
    """Make a file that exists as long as its maker holds it; returns whether this process has made it.

    A file whose maker has died is replaced by the one process that holds the file named after its content. That one is
    made in the same way, so a death at any moment leaves something that can be taken over.
    """
    if _is_made(path, identity):
        return True
    found = _content(path)
    if _verdict(_parsed(found)) != "dead":
        return False
    right = path.with_name(f"{_CLAIM}.{hashlib.sha256(found).hexdigest()[:16]}")
    if not _take(right, identity):
        return False
    try:
        # only the holder of the right changes a file with this content, and its maker is dead
        if _content(path) != found:
            return False
        aside = _written(path, identity)
        aside.replace(path)
        return True
    finally:
        right.unlink(missing_ok=True)


def _is_made(path: Path, identity: str) -> bool:
    """Make a file with its content in one step, unless it exists; returns whether this process has made it."""
    aside = _written(path, identity)
    try:
        os.link(aside, path)
    except FileExistsError:
        # a network file system may repeat a call that has succeeded
        return _content(path) == identity.encode()
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            with path.open("x") as file:
                file.write(identity)
        except FileExistsError:
            return False
        return True
    finally:
        aside.unlink(missing_ok=True)
    return True


def _written(path: Path, identity: str) -> Path:
    aside = path.with_name(f"{_CLAIM}.{uuid4().hex}")
    aside.write_text(identity)
    return aside


def _identity() -> str:
    return json.dumps(
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "started": _started(os.getpid()),
            "seen_from": _surroundings(),
            "id": uuid4().hex,
        }
    )


def _verdict(held: dict[str, Any]) -> Verdict:
    """Return what has become of the process with an identity, as far as this process can tell.

    A process is known by the time of its start, which no change of the clock moves. Numbers and times of processes mean
    the same only within one start of the machine and the same namespaces.
    """
    surroundings = _surroundings()
    if surroundings is None or held.get("seen_from") != surroundings or held["host"] != socket.gethostname():
        return "unknown"
    try:
        os.kill(held["pid"], 0)
    except ProcessLookupError:
        return "dead"
    except OSError:
        return "unknown"  # one of another user
    started = _started(held["pid"])
    # /proc may hide the processes of others
    return "unknown" if started is None else "alive" if started == held.get("started") else "dead"


def _surroundings() -> list[str] | None:
    """Return what two processes must have in common to compare process numbers and start times; None if unknown."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None  # the /proc of another namespace
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(path) for name in ("pid", "time") if os.path.lexists(path := f"/proc/self/ns/{name}")]
    except OSError:
        return None
    return [boot, *spaces]


def _started(pid: int) -> int | str | None:
    """Return the time of a process's start, which identifies it among processes of the same number; None if it has
    ended, or cannot be seen.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, num_threads, ticks = fields[0], fields[17], fields[19]
    # a process that has ended holds nothing, though its parent has not asked for its exit code
    return "ended" if state in "ZX" and int(num_threads) <= 1 else int(ticks)


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _TAKEN or (path.parent / _CLAIM).exists()
        return False


def _in_words(held: dict[str, Any]) -> str:
    return f"process {held['pid']} on {held['host']} since {held['since']}"


def _read(path: Path) -> dict[str, Any]:
    return _parsed(_content(path))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except ValueError:
        return {}
    return data if isinstance(data, dict) and data.keys() >= {"pid", "host", "since"} else {}
