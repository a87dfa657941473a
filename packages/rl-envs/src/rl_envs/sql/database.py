"""SQLite databases that queries of a policy may read, and nothing else."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

MAX_VALUE_BYTES = 2**20
"""Maximum number of bytes of a string or a blob, also within a query."""
MAX_HEAP_BYTES = 2**29
"""Maximum memory in bytes of all queries of a process together."""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob"}
_PER_CHECK = 1000
"""Number of SQLite's instructions between two counts of them."""


class QueryFailed(ValueError):
    """Raised if a query has no result: it is wrong, not allowed, or beyond a limit."""


def database_path(folder: str | Path, name: str) -> Path:
    """Return the file of a database.

    Raises:
        ValueError: If there is none, or the name is not one.
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise ValueError(f"`db_id` must be the name of a database, got {name!r:.80}")
    path = Path(folder, name, f"{name}.sqlite")
    if not path.is_file():
        raise ValueError(f"there is no database {path}")
    return path


def run_query(path: Path, query: str, *, max_instructions: int, max_rows: int) -> list[tuple[Any, ...]]:
    """Return the rows of a query, which may only read. They depend on the database and the query alone, not on time.

    Args:
        path: File of the database.
        query: One statement.
        max_instructions: Maximum number of instructions of SQLite's virtual machine.
        max_rows: Maximum number of rows.

    Raises:
        QueryFailed: With the reason, if there is no result.
    """
    num_checks = 0

    def is_too_long() -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks * _PER_CHECK > max_instructions

    def may(action: int, _first: str | None, second: str | None, *_: Any) -> int:
        is_function = action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _REFUSED_FUNCTIONS
        return sqlite3.SQLITE_OK if action in _ALLOWED or is_function else sqlite3.SQLITE_DENY

    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            connection.execute(f"PRAGMA hard_heap_limit={MAX_HEAP_BYTES}")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.text_factory = lambda data: data.decode(errors="replace")
            connection.set_authorizer(may)
            connection.set_progress_handler(is_too_long, _PER_CHECK)
            rows = connection.execute(query).fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        is_cut = num_checks * _PER_CHECK > max_instructions
        reason = f"it needs more than {max_instructions:,} instructions" if is_cut else f"{error}"
        raise QueryFailed(reason or "it needs too much memory") from None
    if len(rows) > max_rows:
        raise QueryFailed(f"it returns more than {max_rows} rows")
    return rows


def schema_of(path: Path, num_examples: int) -> str:
    """Return the statements that create the tables of a database, each with its first rows as a comment.

    Args:
        path: File of the database.
        num_examples: Number of rows of each table.

    Raises:
        QueryFailed: If the file is not a database.
    """
    limits = {"max_instructions": 10**8, "max_rows": 10_000}
    shown = []
    select = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY rowid"
    for name, sql in run_query(path, select, **limits):
        lines = [f"{sql.strip()};"]
        if num_examples:
            quoted = '"' + name.replace('"', '""') + '"'
            for row in run_query(path, f"SELECT * FROM {quoted} LIMIT {num_examples}", **limits):
                lines.append(f"-- {' | '.join(str(value)[:100] for value in row)}")
        shown.append("\n".join(lines))
    return "\n\n".join(shown)
