"""Folders and files of runs: the check that a folder can be written before anything starts, and how both are made."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.checkpoints.manifest import replaced, sync_path
from rl_launch.run_session.config import Access

_MIN_FREE_BYTES = 2**24

_USUAL_UMASK = 0o022

_FSTAB = Path("/etc/fstab")

_MODES: dict[Access, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that a reader, a kill or a power cut finds the old contents or the new ones.

    A process that is killed may leave `NAME.part` in the folder, which the next write of the same file replaces.
    """
    with replaced(path) as file:
        file.write(text.encode())
    sync_path(path.parent)


def check_writable(folder: Path, *, remedy: str = "Choose another run_dir.") -> None:
    """Refuse a folder that cannot be created or written, or whose disk is full. Leaves no files.

    Args:
        folder: The folder.
        remedy: What to do, as a sentence.

    Raises:
        RunDirectoryError: If that is not possible; contains the reason.
    """
    if (mount := _missing_mount(folder)) is not None:
        raise RunDirectoryError(
            f"{folder} is on a disk that is not mounted: /etc/fstab has {mount}, and nothing is mounted "
            f"there. Mount it. {remedy}"
        )
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
    if free < _MIN_FREE_BYTES:
        raise _full(folder, free, remedy)


def _missing_mount(folder: Path) -> Path | None:
    """Return the place of a file system that should be mounted at boot, that a folder is on, and that is not mounted:
    the files, perhaps of an earlier run, would be somewhere else. None if there is none.
    """
    try:
        lines = [line.split() for line in _FSTAB.read_text().splitlines() if not line.lstrip().startswith("#")]
    except (OSError, ValueError):
        return None
    # the file has spaces in octal
    places = [
        re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), line[1])
        for line in lines
        if (len(line) >= 4 and line[1].startswith("/") and line[2] != "swap" and "noauto" not in line[3].split(","))
    ]
    around = folder.absolute()
    return next((Path(each) for each in places if around.is_relative_to(each) and not os.path.ismount(each)), None)


@contextmanager
def careful_umask() -> Iterator[None]:
    """Prevent this process, and processes that it starts, from making files that everybody may write: a umask that
    allows it, as 000 does, is replaced by the usual 022. Any other is kept.
    """
    earlier = os.umask(_USUAL_UMASK)
    if earlier & stat.S_IWOTH:
        os.umask(earlier)
    try:
        yield
    finally:
        os.umask(earlier)


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
