"""The files of a folder `rollouts`: a file for each recent step, and archives of earlier steps.

`step_<n>.jsonl` holds the rollouts of one step, `val_<n>.jsonl` the rollouts of the validation after it, and
`tokens_<n>.parquet` the values of each token of rollouts of the step. Once `NUM_RECENT` later steps have been made, the
files of `STEPS_PER_ARCHIVE` steps become the members of one compressed `steps_<first>-<last>.zip`, so that a run of
10,000 steps has about 500 files. An archive is complete before the files in it are removed: a step may be in both for a
while, and its own file counts.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from rl_launch.run_session.checkpoints.manifest import replaced, sync_path

STEPS_PER_ARCHIVE = 100
NUM_RECENT = 100
"""Minimum number of recent steps whose rollouts are kept in separate files."""

Kind = Literal["step", "val"]
"""Rollouts of training steps, and rollouts of validations."""

FileKind = Literal["step", "val", "tokens"]
"""Rollouts of a kind, or the values of tokens of training steps."""

_SUFFIXES: Mapping[FileKind, str] = {"step": ".jsonl", "val": ".jsonl", "tokens": ".parquet"}
_KINDS: Mapping[str, FileKind] = {kind: kind for kind in _SUFFIXES}
_FILE = re.compile(r"(step|val|tokens)_(\d+)(\.\w+)")
_ARCHIVE = re.compile(r"steps_(\d+)-(\d+)\.zip")
_BUFFER_BYTES = 2**20


def file_of(folder: Path, step: int, kind: FileKind = "step") -> Path:
    """Return the file of a step that is in no archive."""
    return folder / f"{kind}_{step}{_SUFFIXES[kind]}"


def steps_in(folder: Path, kind: FileKind = "step") -> list[int]:
    """Return the steps that have rollouts of a kind, in order."""
    # files before archives: a step that moves meanwhile is found twice instead of never
    found = set(_loose(folder))
    for _, _, archive in _archives(folder):
        with suppress(FileNotFoundError):
            found.update(_archived(archive))
    return sorted(step for each, step in found if each == kind)


def open_step(folder: Path, step: int, kind: FileKind = "step") -> IO[bytes]:
    """Return the lines of a step.

    Raises:
        FileNotFoundError: If it has no rollouts.
    """
    path = file_of(folder, step, kind)
    with suppress(FileNotFoundError):
        return path.open("rb")
    for first, last, archive in _archives(folder):
        if first <= step <= last:
            with suppress(KeyError), zipfile.ZipFile(archive) as opened:
                # the member keeps the file open
                return opened.open(path.name)
    raise FileNotFoundError(path)


class StepStamps:
    """Finds out which steps have rollouts and which of them have changed, without reading any. An archive is opened
    once.

    Args:
        folder: The folder `rollouts`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._archives: dict[str, tuple[str, dict[tuple[FileKind, int], str]]] = {}

    def now(self) -> dict[tuple[FileKind, int], str]:
        """Return a string for the rollouts of each kind and step, which changes if they do."""
        # files before archives, as in `steps_in`; a step that is in both counts as its own file
        loose = {}
        for kind, step in _loose(self._folder):
            with suppress(FileNotFoundError):
                loose[kind, step] = file_stamp(file_of(self._folder, step, kind))
        found: dict[tuple[FileKind, int], str] = {}
        for _, _, archive in _archives(self._folder):
            with suppress(FileNotFoundError):
                found.update(self._in_archive(archive))
        return found | loose

    def _in_archive(self, archive: Path) -> dict[tuple[FileKind, int], str]:
        name, stamp = archive.name, file_stamp(archive)
        known = self._archives.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        with zipfile.ZipFile(archive) as opened:
            facts = {each.filename: each for each in opened.infolist()}
        members = {}
        for kind, step in _members(list(facts)):
            fact = facts[f"{kind}_{step}{_SUFFIXES[kind]}"]
            members[kind, step] = f"{name}:{fact.file_size}:{fact.CRC}"
        self._archives[name] = stamp, members
        return members


def file_stamp(path: Path) -> str:
    """Return a string that changes if a file is replaced or written."""
    facts = path.stat()
    return f"{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def archive_before(folder: Path, step: int) -> None:
    """Move the files of complete ranges of steps into archives, except the last `NUM_RECENT` steps up to `step`."""
    ranges: dict[int, list[tuple[FileKind, int]]] = {}
    for each in _loose(folder):
        ranges.setdefault((each[1] - 1) // STEPS_PER_ARCHIVE, []).append(each)
    for number, members in sorted(ranges.items()):
        first, last = number * STEPS_PER_ARCHIVE + 1, (number + 1) * STEPS_PER_ARCHIVE
        if last <= step - NUM_RECENT and first > 0:
            _archive(folder, folder / f"steps_{first}-{last}.zip", members)


def cut_back(folder: Path, step: int) -> None:
    """Remove the rollouts of later steps, and files that were not finished."""
    for pattern in (".step_*.part", ".val_*.part", ".tokens_*.part", ".steps_*.part"):
        for path in folder.glob(pattern):
            path.unlink()
    for _, last, archive in _archives(folder):
        if last > step:
            _extract(folder, archive, through=step)
    for kind, later in _loose(folder):
        if later > step:
            file_of(folder, later, kind).unlink()


def _archive(folder: Path, archive: Path, members: list[tuple[FileKind, int]]) -> None:
    if archive.exists():
        # the process was killed before the files were removed
        if not set(_archived(archive)).issuperset(members):
            return
    else:
        aside = folder / f".{archive.name}.part"
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
            for kind, step in members:
                path = file_of(folder, step, kind)
                info = zipfile.ZipInfo.from_file(path, path.name, strict_timestamps=False)
                # a file of tokens is compressed by column
                info.compress_type = zipfile.ZIP_STORED if kind == "tokens" else zipfile.ZIP_DEFLATED
                with path.open("rb") as source, opened.open(info, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _BUFFER_BYTES)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(archive)
        sync_path(folder)
    for kind, step in members:
        file_of(folder, step, kind).unlink()


def _extract(folder: Path, archive: Path, *, through: int) -> None:
    """Turn an archive back into files of its steps up to `through`."""
    with zipfile.ZipFile(archive) as opened:
        for kind, step in _archived(archive):
            target = file_of(folder, step, kind)
            if step > through or target.exists():
                continue
            aside = folder / f".{target.name}.part"
            with opened.open(target.name) as source, replaced(target, aside=aside) as file:
                shutil.copyfileobj(source, file, _BUFFER_BYTES)
    sync_path(folder)
    archive.unlink()


def _loose(folder: Path) -> list[tuple[FileKind, int]]:
    return sorted(_members(_names(folder)), key=lambda member: (member[1], member[0]))


def _members(names: list[str]) -> list[tuple[FileKind, int]]:
    found = [(_KINDS[match[1]], match) for match in map(_FILE.fullmatch, names) if match]
    return [(kind, int(match[2])) for kind, match in found if match[3] == _SUFFIXES[kind]]


def _archived(archive: Path) -> list[tuple[FileKind, int]]:
    with zipfile.ZipFile(archive) as opened:
        return _members(opened.namelist())


def _archives(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield the first and the last step of each archive, and its path; some steps may have no rollouts."""
    for name in _names(folder):
        if match := _ARCHIVE.fullmatch(name):
            yield int(match[1]), int(match[2]), folder / name


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
