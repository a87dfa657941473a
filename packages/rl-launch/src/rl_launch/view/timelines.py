"""Answers about traces and profiles: rows of processes for a whole run and for a step, read a file at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.traces.trace_folder import (
    FOLDER,
    STEPS,
    RangeShares,
    TraceFile,
    length,
    range_shares,
    shares_of,
    trace_files,
    union,
)
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters

Answer = dict[str, Any]

MAX_SPANS = 300
"""Maximum number of spans of a row in an answer; neighbours are joined until there are no more."""

MAX_ROWS = 512

_MAX_COLUMNS = 400

_TOOLS = {
    ".torch.json.gz": ("torch", "operators and kernels; open it in ui.perfetto.dev"),
    ".memory.pickle": ("memory", "history of the CUDA allocator; drop it on pytorch.org/memory_viz"),
    ".py-spy.json": ("py-spy", "samples of the stacks; open it in speedscope.app"),
    ".nsys-rep": ("nsys", "open it with nsys-ui, or sum it up with nsys stats"),
}


class _Span(NamedTuple):
    """A span of a step, in seconds since the step began."""

    begin: float
    end: float
    name: str
    number: int


def processes(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the busy share of every row of the traces by range of steps, and the steps that have traces."""
    folder = catalog[given.text("id")].path / FOLDER
    files = trace_files(folder)
    found = {each.first: each for each in range_shares(folder)}
    for each in files:
        if each.is_open:
            facts = each.path.stat()
            found[each.first] = _shares_of_open(each, facts.st_size, facts.st_mtime_ns)
    ranges = [found[first] for first in sorted(found)]
    # means of neighbouring ranges, so that there are at most `_MAX_COLUMNS`
    size = max(1, -(-len(ranges) // _MAX_COLUMNS))
    parts = []
    for start in range(0, len(ranges), size):
        near = ranges[start : start + size]
        seconds = sum(each.seconds for each in near)
        names = {row for each in near for row in each.shares}
        busy = {row: sum(each.shares.get(row, 0.0) * each.seconds for each in near) for row in names}
        shares = {row: total / seconds if seconds else 0.0 for row, total in busy.items()}
        parts.append(RangeShares(near[0].first, near[-1].last, seconds, shares))
    rows = sorted({row for part in parts for row in part.shares}, key=_order)[:MAX_ROWS]
    whole = sum(part.seconds for part in parts)
    return {
        "ranges": [[part.first, part.last] for part in parts],
        "rows": [
            {
                "process": row.partition("/")[0],
                "track": row.partition("/")[2],
                "busy": [part.shares.get(row, 0.0) for part in parts],
                "share": sum(part.shares.get(row, 0.0) * part.seconds for part in parts) / whole if whole else 0.0,
            }
            for row in rows
        ],
        "first": files[0].first if files else None,
        "last": _last_step(files) if files else None,
        "files": [{"first": each.first, "last": each.last, "path": str(each.path)} for each in files[-3:]],
    }


def spans(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the spans of a step in rows of processes, and the share of the step for which each row is idle.

    A step that was made again after a restart is shown as it was made last.
    """
    folder = catalog[given.text("id")].path / FOLDER
    files = trace_files(folder)
    if not files:
        raise RunDirectoryError("this run has no traces")
    step = given.integer("step", _last_step(files))
    file = next((each for each in files if each.first <= step <= each.last), None)
    windows = [(begin, end) for number, begin, end in _steps(file) if number == step] if file is not None else []
    if file is None or not windows:
        raise RunDirectoryError(f"there is no trace of step {step}; old ones are removed to bound their size")
    begin, end = windows[-1]
    rows, marks = _rows(file, begin, end)
    chosen = sorted(rows, key=lambda row: _order("/".join(row)))[:MAX_ROWS]
    return {
        "step": step,
        "seconds": (end - begin) / 1e6,
        "rows": [_row(process, track, rows[process, track], (end - begin) / 1e6) for process, track in chosen],
        "marks": [{"at": at, "text": text} for at, text in marks],
    }


def traced_steps(run_dir: Path) -> list[int]:
    """Return the steps that have spans, in order."""
    return sorted({step for file in trace_files(run_dir / FOLDER) for step, _, _ in _steps(file)})


def profiles(catalog: PageCatalog, given: Parameters) -> Answer:
    """Answer with the profiles of a run: what each is, and how to open it."""
    folder = catalog[given.text("id")].path / "profiles"
    found = []
    for path in sorted(folder.glob("step_*/*")):
        match = re.fullmatch(r"step_(\d+)-(\d+)", path.parent.name)
        ending = next((each for each in _TOOLS if path.name.endswith(each)), None)
        if match and ending and path.is_file():
            tool, how = _TOOLS[ending]
            found.append(
                {
                    "first": int(match[1]),
                    "last": int(match[2]),
                    "worker": path.name.removesuffix(ending),
                    "tool": tool,
                    "how": how,
                    "path": str(path),
                    "bytes": path.stat().st_size,
                }
            )
    return {"profiles": found}


@lru_cache(maxsize=16)
def _shares_of_open(file: TraceFile, size: int, changed: int) -> RangeShares:
    del size, changed
    return shares_of(file.first, file.last, file.events())


def _order(row: str) -> tuple[Any, ...]:
    """Return a key that sorts the driver first, then processes by name and number."""
    process, _, track = row.partition("/")
    name, _, number = process.rpartition("-")
    return process != "driver", *((name, int(number)) if number.isdigit() else (process, 0)), track


def _last_step(files: Sequence[TraceFile]) -> int:
    """Return the last step that has spans."""
    last = (max(steps) for file in reversed(files) if (steps := [step for step, _, _ in _steps(file)]))
    return next(last, files[0].first)


def _steps(file: TraceFile) -> Iterator[tuple[int, float, float]]:
    """Yield the steps of a file with their begin and end in microseconds, in the order of their spans."""
    for event in file.events():
        if event["ph"] == "X" and event.get("cat") == STEPS:
            yield int(event["name"].removeprefix("step ")), event["ts"], event["ts"] + event["dur"]


def _rows(
    file: TraceFile, begin: float, end: float
) -> tuple[dict[tuple[str, str], list[_Span]], list[tuple[float, str]]]:
    """Return the spans that reach into a window, cut to it, by process and track; and the marks in it."""
    names: dict[int, str] = {}
    rows: dict[tuple[str, str], list[_Span]] = {}
    marks = []
    for event in file.events():
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "i" and begin <= event["ts"] <= end:
            marks.append(((event["ts"] - begin) / 1e6, event["name"]))
        elif event["ph"] == "X" and event["cat"] != STEPS and event["ts"] < end and event["ts"] + event["dur"] > begin:
            first, last = max(0.0, event["ts"] - begin) / 1e6, (min(end, event["ts"] + event["dur"]) - begin) / 1e6
            span = _Span(first, last, event["name"], event.get("args", {}).get("count", 1))
            rows.setdefault((names.get(event["pid"], ""), event["cat"]), []).append(span)
    return rows, marks


def _row(process: str, track: str, found: Sequence[_Span], seconds: float) -> Answer:
    busy = length(union([(span.begin, span.end) for span in found]))
    shown = []
    open_ends: list[float] = []
    for span in _fewer(found):
        while open_ends and open_ends[-1] <= span.begin + 1e-9:
            open_ends.pop()
        depth = len(open_ends)  # the number of spans that it is nested in
        open_ends.append(span.end)
        shown.append([round(span.begin, 6), round(span.end - span.begin, 6), span.name, span.number, depth])
    idle = 1 - busy / seconds if seconds else 0.0
    return {"process": process, "track": track, "idle": idle, "spans": shown}


def _fewer(found: Sequence[_Span]) -> list[_Span]:
    """Return spans in order. If there are too many, the spans with the smallest gaps between them are joined."""
    ordered = sorted(found, key=lambda span: (span.begin, -span.end))
    if len(ordered) <= MAX_SPANS:
        return ordered
    gaps = sorted(after.begin - before.end for before, after in pairwise(ordered))
    limit = gaps[len(ordered) - MAX_SPANS - 1]
    joined = [ordered[0]]
    for span in ordered[1:]:
        last = joined[-1]
        if span.begin - last.end <= limit:
            name = last.name if last.name == span.name else "several"
            joined[-1] = _Span(last.begin, max(last.end, span.end), name, last.number + span.number)
        else:
            joined.append(span)
    return joined
