"""Logs of a run: their list, parts of them by position, and the events in the driver's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import RunDirectoryError

MOST_BYTES = 2**18
"""Maximum number of bytes of a log in one answer."""

_TAIL_BYTES = 2**22
"""The end of the driver's log that is read for events."""

_MOST_EVENTS = 500
_DEEPEST = 2
_SUFFIXES = (".log", ".1", ".txt", ".err", ".out")
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")
_STEP = re.compile(r"step (\d+)/\d+ ")
_OF_INTEREST = re.compile(
    r"restart|resum|lost|died|killed|replica|reconnect|weight|checkpoint|saved|stall|timed? ?out|SIGTERM|SIGINT|ended",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogFile:
    """A log.

    Args:
        name: Path below the folder `logs`.
        size: Size in bytes.
        changed: Time of the last write, in seconds since 1970.
    """

    name: str
    size: int
    changed: float


@dataclass(frozen=True)
class LogPart:
    """A part of a log.

    Args:
        text: Its text; bytes that are not UTF-8 are replaced.
        start: Position of the first byte.
        end: Position after the last byte, from which the next part follows.
        size: Size of the log in bytes.
        has_started_over: True if the log has become shorter than the requested position, as a full one does.
    """

    text: str
    start: int
    end: int
    size: int
    has_started_over: bool


@dataclass(frozen=True)
class Event:
    """A record of the driver's log that a timeline shows.

    Args:
        at: Local time, as the log has it.
        level: Level of the record.
        text: The message.
        step: The step in progress, as far as the log has reported steps; None before the first.
    """

    at: str
    level: str
    text: str
    step: int | None


def log_files(folder: Path) -> list[LogFile]:
    """Return the logs in a folder `logs` and the folders in it, the most recently written first."""
    return sorted(_logs_below(folder, folder, _DEEPEST), key=lambda each: -each.changed)


def _logs_below(folder: Path, top: Path, depth: int) -> Iterator[LogFile]:
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for path in paths:
        if path.is_dir() and not path.is_symlink() and depth:
            yield from _logs_below(path, top, depth - 1)
        elif path.suffix in _SUFFIXES and path.is_file() and not path.is_symlink() and path.name[:1] != ".":
            facts = path.stat()
            yield LogFile(path.relative_to(top).as_posix(), facts.st_size, facts.st_mtime)


def log_part(folder: Path, name: str, start: int | None) -> LogPart:
    """Return a part of a log.

    Args:
        folder: The folder `logs`.
        name: One of the names of `log_files`.
        start: Position of the first byte; None for the end of the log. Negative to count from the end.

    Raises:
        RunDirectoryError: If there is no such log.
    """
    if name not in {each.name for each in log_files(folder)}:
        raise RunDirectoryError(f"there is no log {name!r}")
    with (folder / name).open("rb") as file:
        size = file.seek(0, 2)
        has_started_over = start is not None and start > size
        if start is None or has_started_over:
            start = 0 if has_started_over else max(0, size - MOST_BYTES)
        start = max(0, size + start if start < 0 else start)
        file.seek(start)
        data = file.read(MOST_BYTES)
    if start and start >= size - MOST_BYTES and (skipped := data.find(b"\n")) >= 0 and size - start == MOST_BYTES:
        # the first line is cut
        start, data = start + skipped + 1, data[skipped + 1 :]
    # the last character may not be complete yet
    whole = data if start + len(data) < size else data[: data.rfind(b"\n") + 1] or data
    return LogPart(whole.decode(errors="replace"), start, start + len(whole), size, has_started_over)


def events(folder: Path) -> list[Event]:
    """Return warnings, errors, and records of restarts, replicas, weights and checkpoints in the end of the driver's
    log, oldest first.

    Args:
        folder: The folder `logs`.
    """
    try:
        with (folder / "driver.log").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found, step = [], None
    for line in lines:
        match = _RECORD.fullmatch(line)
        if match and (done := _STEP.match(match[4])):
            step = int(done[1]) + 1
        elif match and (match[2] not in ("DEBUG", "INFO") or _OF_INTEREST.search(match[4])):
            found.append(Event(match[1], match[2].lower(), match[4][:1000], step))
    return found[-_MOST_EVENTS:]
