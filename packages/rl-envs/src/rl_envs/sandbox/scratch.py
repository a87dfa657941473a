"""Folders below the temporary folder that are removed with all that programs leave in them, even after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator

_PREFIX = "rl-scratch-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILES = "files"

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def temporary_folder(uid: int) -> Iterator[str]:
    """Create an empty folder of a user; it is removed with all that is in it.

    Its parent belongs to this user, and is locked while this process runs, so that `sweep` does not remove it.
    """
    while True:
        parent = tempfile.mkdtemp(prefix=_PREFIX)
        lock = os.open(parent, _FOLDER)
        with contextlib.suppress(OSError):  # On a filesystem without locks nobody sweeps it.
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            break
        os.close(lock)  # Another process swept it before it was locked.
    # Programs enter it under their user ids; nobody else can open it, so nobody else can hold its lock.
    os.fchmod(lock, 0o711)
    folder = f"{parent}/{_FILES}"
    try:
        os.mkdir(folder, 0o700)
        os.chown(folder, uid, -1)
        yield folder
    finally:
        _remove(parent, lock)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of this user whose processes were killed."""
    for folder, descriptor in _abandoned():
        _remove(folder, descriptor)


def abandoned() -> set[str]:
    """Return the folders of this user whose processes were killed."""
    return {folder for folder, _ in _abandoned()}


def _abandoned() -> Iterator[tuple[str, int]]:
    """Yield each such folder and a descriptor that holds its lock meanwhile."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for folder in found:
        try:
            descriptor = os.open(folder, _FOLDER)
        except OSError:  # It belongs to another user, or is gone.
            continue
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # It is in use, or this filesystem has no locks.
                continue
            yield folder, descriptor
        finally:
            os.close(descriptor)


def _remove(folder: str, descriptor: int) -> None:
    try:
        _empty(descriptor)
        os.rmdir(folder)
    except OSError as error:
        message = "the sandbox's folder %s could not be removed: %s. The next sandbox that starts tries again."
        _logger.warning(message, folder, error)


def _empty(top: int) -> None:
    """Remove all folders in a folder that has nothing else.

    Folders within them are moved up before, so that neither a path nor a stack becomes as deep as a program made them.
    """
    moved = itertools.count()
    while names := os.listdir(top):
        for name in names:
            _make_accessible(name, top)
            folder = os.open(name, _FOLDER, dir_fd=top)
            try:
                _flatten(folder, top, moved)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _flatten(folder: int, top: int, moved: Iterator[int]) -> None:
    """Remove the files of a folder, and move its folders to the top."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _make_accessible(entry.name, folder)  # A folder that may not be written cannot be moved.
                os.rename(entry.name, str(next(moved)), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(entry.name, dir_fd=folder)


def _make_accessible(name: str, parent: int) -> None:
    """Permit this user everything in a folder, which may have been replaced by a link meanwhile."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)
