"""Folders of runs: the check that one can be written before anything is started, and its making."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from rl_core.errors import RunDirectoryError
from rl_launch.session.config import Access

_LEAST_FREE_BYTES = 2**24
_MODES: dict[Access, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}


def check_writable(folder: Path, *, remedy: str = "Choose another run_dir.") -> None:
    """Refuse a folder that cannot be created or written, or whose disk is full. Leaves no files.

    Args:
        folder: The folder.
        remedy: What to do, as a sentence.

    Raises:
        RunDirectoryError: If that is not possible; contains the reason.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        what = f"a link to {existing.readlink()}, which does not exist" if not existing.exists() else "a file"
        reason = f"{'it' if existing == folder else existing} is {what}"
        raise RunDirectoryError(f"{folder} cannot be made: {reason}. {remedy}")
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(folder, 0, remedy) from None
        verb = "written to" if existing == folder else f"made in {existing}"
        raise RunDirectoryError(f"{folder} cannot be {verb}: {error.strerror}. {remedy}") from None
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        raise _full(folder, free, remedy)


def make_folder(folder: Path, access: Access) -> None:
    """Make a folder, and those around it, unless it exists; one that exists keeps its mode."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # never open to more, even for a moment; the umask may have taken bits away
    folder.mkdir(mode=_MODES[access], exist_ok=True)
    folder.chmod(_MODES[access])


def _full(folder: Path, free: int, remedy: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"the disk of {folder} is full: {free / 2**20:.1f} MiB are free. Free some space, or do this: {remedy}"
    )
