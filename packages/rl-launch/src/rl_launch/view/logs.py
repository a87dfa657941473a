"""Answers about the logs of a run: their list, parts of them by position, and the events in the driver's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import RunDirectoryError
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters

MAX_BYTES = 2**18
"""Maximum number of bytes of a log in one answer."""

_TAIL_BYTES = 2**22
"""The end of the driver's log that is read for events."""

_MAX_EVENTS = 500
_MAX_DEPTH = 2
_SUFFIXES = (".log", ".1", ".txt", ".err", ".out")
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")
_STEP = re.compile(r"step (\d+)/\d+ ")
_OF_INTEREST = re.compile(
    r"restart|resum|lost|died|killed|replica|reconnect|weight|checkpoint|saved|stall|timed? ?out|SIGTERM|SIGINT|ended",
    re.IGNORECASE,
)


def log_list(catalog: PageCatalog, given: Parameters) -> dict[str, Any]:
    """Answer with the logs of a run or an evaluation, the most recently written first: name below the folder `logs`,
    size in bytes, and time of the last write in seconds since 1970."""
    folder = catalog[given.text("id")].logs
    return {"logs": sorted(_logs_below(folder, folder, _MAX_DEPTH), key=lambda each: -each["changed"])}


def _logs_below(folder: Path, top: Path, depth: int) -> Iterator[dict[str, Any]]:
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for path in paths:
        if path.is_dir() and not path.is_symlink() and depth:
            yield from _logs_below(path, top, depth - 1)
        elif path.suffix in _SUFFIXES and path.is_file() and not path.is_symlink() and path.name[:1] != ".":
            facts = path.stat()
            yield {"name": path.relative_to(top).as_posix(), "size": facts.st_size, "changed": facts.st_mtime}


def log(catalog: PageCatalog, given: Parameters) -> dict[str, Any]:
    """Answer with a part of a log from the position `start` in bytes, or its end; a negative position counts from it.

    The next part follows from `end`. Bytes that are not UTF-8 are replaced. `has_started_over` is true if the log has
    become shorter than the requested position, as a full one does.
    """
    folder, name = catalog[given.text("id")].logs, given.text("name")
    start = given.integer("start", 0) if given.has("start") else None
    if name not in {each["name"] for each in _logs_below(folder, folder, _MAX_DEPTH)}:
        raise RunDirectoryError(f"there is no log {name!r}")
    with (folder / name).open("rb") as file:
        size = file.seek(0, 2)
        has_started_over = start is not None and start > size
        if start is None or has_started_over:
            start = 0 if has_started_over else max(0, size - MAX_BYTES)
        start = max(0, size + start if start < 0 else start)
        file.seek(start)
        data = file.read(MAX_BYTES)
    if start and start >= size - MAX_BYTES and (skipped := data.find(b"\n")) >= 0 and size - start == MAX_BYTES:
        # the first line is cut
        start, data = start + skipped + 1, data[skipped + 1 :]
    # the last character may not be complete yet
    whole = data if start + len(data) < size else data[: data.rfind(b"\n") + 1] or data
    answer = {"text": whole.decode(errors="replace"), "start": start, "end": start + len(whole), "size": size}
    return {**answer, "has_started_over": has_started_over}


def events(folder: Path) -> list[dict[str, Any]]:
    """Return warnings, errors, and records of restarts, replicas, weights and checkpoints in the end of the driver's
    log, oldest first: local time as the log has it, level, text, and the step in progress.

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
            found.append({"at": match[1], "level": match[2].lower(), "text": match[4][:1000], "step": step})
    return found[-_MAX_EVENTS:]
