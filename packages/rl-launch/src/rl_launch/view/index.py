"""An index of rollouts: where each line begins, and the values to filter and sort by.

It is a SQLite database in the user's cache folder, so that a run directory that cannot be written can be read. Steps
are added when a question first concerns them. A step whose file has grown is continued where the last line ended, and a
step whose file was replaced is read again. The database can be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from rl_core.rollouts.record import turns_of
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.show.selection import reward_of

_VERSION = 2
MAX_LINE_BYTES = 2**25
"""Longest line that is parsed. A longer one is listed without values."""

_TAIL_BYTES = 4096
_MAX_CHOICES = 200
_REWARDS = "rewards"
_KINDS: Mapping[str, rollout_store.Kind] = {"step": "step", "val": "val"}

_COLUMNS = (
    *("offset", "length", "prompt_id", "position", "task", "dataset", "environment", "reward", "advantage"),
    *("num_tokens", "num_turns", "status", "stop_reason", "failure", "version", "rewards"),
)
_TABLES = f"""
create table steps
  (kind text, step integer, stamp text, bytes integer, rows integer, tail text, choices text,
  primary key (kind, step));
create table rollouts (kind text, step integer, row integer, {", ".join(_COLUMNS)}, primary key (kind, step, row))
  without rowid;
create index prompts on rollouts (kind, prompt_id, step);
"""

_SELECT = f"select kind, step, row, {', '.join(_COLUMNS)} from rollouts"

EQUALS = ("task", "dataset", "environment", "status", "stop_reason", "prompt_id")
"""Columns that a question can require a value of."""

RANGES = ("reward", "advantage", "num_tokens", "num_turns", "version")
"""Columns that a question can bound."""


def cache_folder() -> Path:
    """Return the folder of the indexes: `rl/view` in `XDG_CACHE_HOME`, or in `~/.cache`. It may be removed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl" / "view"


class RunRollouts:
    """Rollouts of a run, one JSON object per line: `step` for training and `val` for validations.

    Args:
        path: The folder `rollouts` of the run.
    """

    kinds = tuple(_KINDS)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps = rollout_store.StepStamps(path)

    def stamps(self, kind: str) -> dict[int, str]:
        """Return the steps that have rollouts of a kind, in order, each with a string that changes if its lines do."""
        found = self._stamps.now()
        return {step: found[each, step] for each, step in sorted(found, key=lambda key: key[1]) if each == kind}

    def open(self, kind: str, step: int) -> IO[bytes]:
        """Open the lines of a step; the file can seek.

        Raises:
            FileNotFoundError: If it has no rollouts.
        """
        if kind not in _KINDS:
            raise FileNotFoundError(f"no kind of rollouts is called {kind!r}")
        return rollout_store.open_step(self.path, step, _KINDS[kind])


class SingleFile:
    """One file of rollouts, such as `rollouts.jsonl` of an evaluation. Its only step is 0; see `RunRollouts`.

    Args:
        path: Path of the file, which may not exist yet.
        kind: Kind of its rollouts.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kinds = (kind,)

    def stamps(self, kind: str) -> dict[int, str]:
        """Return step 0 if there is a file."""
        return {0: rollout_store.file_stamp(self.path)} if kind in self.kinds and self.path.is_file() else {}

    def open(self, kind: str, step: int) -> IO[bytes]:
        """Open the file."""
        if kind not in self.kinds or step != 0:
            raise FileNotFoundError(f"{self.path} has no rollouts {kind!r} of step {step}")
        return self.path.open("rb")


class RolloutLine(NamedTuple):
    """A line of a file of rollouts.

    Args:
        kind: Kind of the rollouts.
        step: Step of the file.
        row: Number of the line, from 0.
        offset: Position of the line in bytes.
        length: Length in bytes, with the end of the line.
    """

    kind: str
    step: int
    row: int
    offset: int
    length: int


@dataclass(frozen=True)
class RolloutQuery:
    """A question about the rollouts of a range of steps.

    Args:
        kind: Kind of the rollouts.
        first: First step.
        last: Last step.
        equal: Required values by column, of `EQUALS`.
        least: Lower limits by column, of `RANGES`, inclusive.
        most: Upper limits by column, of `RANGES`, inclusive.
        sort: Column of `RANGES`, `position` or `rewards.NAME`, descending if it begins with `-`; rollouts without a
            value come last. Empty for the newest step first, in the order of the file.
    """

    kind: str = "step"
    first: int = 0
    last: int = 2**31
    equal: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    sort: str = ""


class RolloutIndex:
    """The index of one source. Any thread may call it.

    Args:
        source: Files of the rollouts.
        folder: Folder of the database; None to keep it in memory.
    """

    def __init__(self, source: RunRollouts | SingleFile, folder: Path | None) -> None:
        self._source = source
        self._lock = threading.RLock()
        self._database = _database(source.path, folder)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def extend(self, kind: str, steps: Iterable[int], deadline: float) -> int:
        """Add steps, or what was written to them since, until a time; at least one that is missing.

        Args:
            kind: Kind of the rollouts.
            steps: Steps in the order of adding them.
            deadline: By `time.monotonic`.

        Returns:
            Number of steps that remain.
        """
        stamps = self._source.stamps(kind)
        known = dict(self._query("select step, stamp from steps where kind = ?", (kind,)))
        waiting = [step for step in steps if known.get(step) != stamps.get(step)]
        for position, step in enumerate(waiting):
            self._extend_step(kind, step, stamps.get(step))
            if time.monotonic() > deadline:
                return len(waiting) - position - 1
        return 0

    def _query(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def count(self, question: RolloutQuery) -> int:
        """Return the number of rollouts that meet a question."""
        condition, values = _condition(question)
        [[number]] = self._query(f"select count(*) from rollouts where {condition}", values)
        return int(number)

    def page(self, question: RolloutQuery, offset: int, limit: int) -> list[dict[str, Any]]:
        """Return the values of rollouts that meet a question, in its order.

        Args:
            question: The question.
            offset: Number of rollouts to skip.
            limit: Maximum number of rollouts.
        """
        condition, values = _condition(question)
        order, order_values = _order(question.sort)
        query = f"{_SELECT} where {condition} order by {order} limit ? offset ?"
        rows = self._query(query, [*values, *order_values, limit, offset])
        found = [dict(zip(("kind", "step", "row", *_COLUMNS), row, strict=True)) for row in rows]
        for each in found:
            each["rewards"] = json.loads(each["rewards"] or "{}")
        return found

    def choices(self, kind: str, first: int, last: int) -> dict[str, list[str]]:
        """Return the values of each column of `EQUALS` except the prompts, and the rewards, in a range of
        steps."""
        query = "select distinct choices from steps where kind = ? and step between ? and ?"
        rows = self._query(query, (kind, first, last))
        found: dict[str, set[str]] = {column: set() for column in (*EQUALS[:-1], _REWARDS)}
        for (text,) in rows:
            for column, values in json.loads(text).items():
                found[column].update(values)
        return {column: sorted(values)[:_MAX_CHOICES] for column, values in found.items()}

    def line(self, kind: str, step: int, row: int) -> RolloutLine | None:
        """Return a line, after lines that the step has received since are indexed; None if it does not exist."""
        self.extend(kind, [step], deadline=0.0)
        query = "select offset, length from rollouts where kind = ? and step = ? and row = ?"
        found = self._query(query, (kind, step, row))
        return RolloutLine(kind, step, row, *found[0]) if found else None

    def same_prompt(self, kind: str, prompt_id: str, limit: int) -> list[tuple[int, int, float | None]]:
        """Return steps that are indexed and have rollouts of a prompt: step, their number and their mean reward."""
        select = "select step, count(*), avg(reward) from rollouts where kind = ? and prompt_id = ?"
        return self._query(f"{select} group by step order by step desc limit ?", (kind, prompt_id, limit))

    def read(self, lines: Sequence[RolloutLine]) -> list[bytes]:
        """Return the contents of lines of any steps, in the order given; empty for a line that is gone."""
        found: dict[int, bytes] = {}
        by_step: dict[tuple[str, int], list[int]] = {}
        for number, line in enumerate(lines):
            by_step.setdefault((line.kind, line.step), []).append(number)
        for (kind, step), numbers in by_step.items():
            # reads follow the order of the file, because a member of an archive is decompressed up to each of them
            with suppress(FileNotFoundError), self._source.open(kind, step) as file:
                for number in sorted(numbers, key=lambda number: lines[number].offset):
                    file.seek(lines[number].offset)
                    found[number] = file.read(min(lines[number].length, MAX_LINE_BYTES))
        return [found.get(number, b"") for number in range(len(lines))]

    def _extend_step(self, kind: str, step: int, stamp: str | None) -> None:
        """Add the lines that are missing of a step; without a stamp it has no rollouts any more."""
        if stamp is None:
            with self._lock, self._database:
                for table in ("rollouts", "steps"):
                    self._database.execute(f"delete from {table} where kind = ? and step = ?", (kind, step))
            return
        query = "select stamp, bytes, rows, tail, choices from steps where kind = ? and step = ?"
        known: Any = next(iter(self._query(query, (kind, step))), None)
        offset, row, tail, choices = 0, 0, "", "{}"
        try:
            with self._source.open(kind, step) as file:
                before, after = known[0].split(":") if known is not None else [""], stamp.split(":")
                # the same file may have grown since
                may_continue = before[0] == after[0] and before[0].isdigit() and int(after[1]) >= int(before[1])
                if may_continue and _tail(file, known[1]) == known[3]:
                    _, offset, row, tail, choices = known
                added = list(_entries(file, offset, row))
                if added:
                    row, offset = added[-1][0] + 1, added[-1][1] + added[-1][2]
                    tail = _tail(file, offset)
        except FileNotFoundError:
            return  # removed meanwhile
        with self._lock, self._database:
            if not added or added[0][0] == 0:
                outdated = "delete from rollouts where kind = ? and step = ? and row >= ?"
                self._database.execute(outdated, (kind, step, 0 if added else row))
            marks = ", ".join("?" * (len(_COLUMNS) + 3))
            rows = ((kind, step, *entry) for entry in added)
            self._database.executemany(f"insert or replace into rollouts values ({marks})", rows)
            values = (kind, step, stamp, offset, row, tail, _choices(added, json.loads(choices)))
            self._database.execute("insert or replace into steps values (?, ?, ?, ?, ?, ?, ?)", values)


def _database(path: Path, folder: Path | None) -> sqlite3.Connection:
    """Open the database of a source, made anew if another version wrote it or it cannot be read."""
    if folder is not None:
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:20]
        file = folder / f"{name}.sqlite"
        for _ in range(2):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                return _opened(str(file))
            except OSError:
                break
            except sqlite3.DatabaseError:
                with suppress(OSError):
                    file.unlink()
    return _opened(":memory:")


def _opened(name: str) -> sqlite3.Connection:
    database = sqlite3.connect(name, timeout=5, check_same_thread=False)
    try:
        if name != ":memory:":
            database.execute("pragma journal_mode=wal")
            database.execute("pragma synchronous=off")
        version = database.execute("pragma user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"version {version}")
        if version == 0:
            with database:
                database.executescript(f"begin; {_TABLES} pragma user_version={_VERSION}; commit;")
    except BaseException:
        database.close()
        raise
    return database


def _choices(added: Sequence[tuple[Any, ...]], known: dict[str, list[str]]) -> str:
    """Return the values of the columns that a page offers as a choice, among new and earlier rows, as JSON."""
    found = {}
    for column in (*EQUALS[:-1], _REWARDS):
        at = _COLUMNS.index(column) + 1
        values = {entry[at] for entry in added if entry[at]}
        if column == _REWARDS:
            values = {name for text in values for name in json.loads(text)}
        found[column] = sorted(values | set(known.get(column, ())))[:_MAX_CHOICES]
    return json.dumps(found)


def _tail(file: IO[bytes], end: int) -> str:
    """Return a digest of the last bytes before a position, which another file is unlikely to have."""
    file.seek(max(0, end - _TAIL_BYTES))
    return hashlib.sha256(file.read(min(end, _TAIL_BYTES))).hexdigest()[:16]


def _entries(file: IO[bytes], offset: int, row: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table for the complete lines of a file from a position: number of the line, position,
    length, and the values of the rollout."""
    file.seek(offset)
    while line := file.readline(MAX_LINE_BYTES):
        length, is_whole = len(line), True
        if not line.strip():
            offset += length
            continue
        while not line.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
            line, length, is_whole = more, length + len(more), False
        values = _described(line) if is_whole else {"status": "too long"}
        if not line.endswith(b"\n") and "status" not in values:
            # the end of a file that is being written
            return
        yield row, offset, length, *(values.get(name) for name in _COLUMNS[2:])
        offset, row = offset + length, row + 1


def _described(line: bytes) -> dict[str, Any]:
    """Return the values of a rollout that the index has; only a status if the line is not a rollout."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {"status": "unreadable"} if line.endswith(b"\n") else {}
    if not isinstance(record, dict):
        return {"status": "unreadable"}

    def number(name: str) -> Any:
        return record[name] if _is_number(record.get(name)) else None

    def text(name: str) -> str:
        return "" if record.get(name) is None else str(record[name])

    given = record.get("rewards")
    rewards = (
        {str(name): value for name, value in given.items() if _is_number(value)} if isinstance(given, dict) else {}
    )
    versions = record.get("weight_versions")
    has_failed = record.get("status") == "failed"
    return {
        "prompt_id": text("prompt_id"),
        "position": number("index"),
        "task": text("task"),
        "dataset": text("dataset"),
        "environment": text("environment"),
        "reward": None if has_failed or not rewards else reward_of({"rewards": rewards}),
        "advantage": number("advantage"),
        "num_tokens": number("num_sampled"),
        "num_turns": len(turns_of(record)) if isinstance(record.get("turns", record.get("segments")), list) else None,
        "status": text("status") or "ok",
        "stop_reason": text("stop_reason"),
        "failure": text("failure")[:200],
        "version": versions[-1] if isinstance(versions, list) and versions and _is_number(versions[-1]) else None,
        "rewards": json.dumps(rewards) if rewards else None,
    }


def _is_number(value: Any) -> bool:
    # SQLite cannot store larger numbers
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**62


def _condition(question: RolloutQuery) -> tuple[str, list[Any]]:
    parts, values = ["kind = ? and step between ? and ?"], [question.kind, question.first, question.last]
    for column, value in question.equal.items():
        assert column in EQUALS, column
        parts.append(f"{column} = ?")
        values.append(value)
    for limits, sign in ((question.least, ">="), (question.most, "<=")):
        for column, limit in limits.items():
            assert column in RANGES, column
            parts.append(f"{column} {sign} ?")
            values.append(limit)
    return " and ".join(parts), values


def _order(sort: str) -> tuple[str, list[Any]]:
    if not sort:
        return "step desc, row", []
    column, direction = sort.removeprefix("-"), "desc" if sort.startswith("-") else "asc"
    if column in (*RANGES, "position", "step"):
        return f"{column} is null, {column} {direction}, step desc, row", []
    name = column.removeprefix("rewards.")
    path = '$."' + name.replace('"', "") + '"'
    value = "json_extract(rewards, ?)"
    return f"{value} is null, {value} {direction}, step desc, row", [path, path]
