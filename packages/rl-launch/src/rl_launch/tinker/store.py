"""The queue on disk: sessions, models, requests with their results, samplers and checkpoints, in one SQLite file.

Every change is one transaction of a file in WAL mode, so that what was acknowledged outlives the process, however it
ends. A request is stored before it is acknowledged, and its result before anybody can read it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS usage (
    tenant TEXT PRIMARY KEY, steps INTEGER NOT NULL DEFAULT 0, trained_tokens INTEGER NOT NULL DEFAULT 0,
    sampled_tokens INTEGER NOT NULL DEFAULT 0, requests INTEGER NOT NULL DEFAULT 0, waited_s REAL NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, metadata TEXT NOT NULL,
    name TEXT, finished TEXT);
CREATE TABLE IF NOT EXISTS models (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL, tenant TEXT NOT NULL,
    settings TEXT NOT NULL, metadata TEXT, created REAL NOT NULL, asked REAL NOT NULL, next_seq INTEGER NOT NULL,
    stepped_seq INTEGER NOT NULL, saved_seq INTEGER NOT NULL, steps INTEGER NOT NULL DEFAULT 0,
    corrupted INTEGER NOT NULL DEFAULT 0, ended INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, scope TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB, size INTEGER NOT NULL, arrived REAL NOT NULL, state TEXT NOT NULL DEFAULT 'pending', media TEXT,
    result BLOB, number INTEGER, finished REAL, given REAL);
CREATE INDEX IF NOT EXISTS requests_by_scope ON requests (scope, seq);
CREATE INDEX IF NOT EXISTS requests_by_state ON requests (state);
CREATE INDEX IF NOT EXISTS requests_by_number ON requests (number);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, tenant TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    folder TEXT NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, settings TEXT NOT NULL, created REAL NOT NULL,
    expires REAL, metadata TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT, path TEXT, folder TEXT,
    digest TEXT, is_kept INTEGER NOT NULL, clients INTEGER NOT NULL DEFAULT 0, used REAL NOT NULL);
"""

STATE_CHANGES = ("forward_backward", "optim_step")
"""Kinds of requests that are made again to restore a model from its last save."""

Row = sqlite3.Row


class Store:
    """The queue in a folder. May be called from any thread.

    Args:
        folder: Folder of the file and of the folders of weights; made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.RLock()
        self._db = sqlite3.connect(folder / "queue.sqlite3", check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_TABLES)
        self._number = int(self._value("SELECT COALESCE(MAX(number), 0) FROM requests"))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Enter a context whose changes are made together, or not at all."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def rows(self, query: str, *values: Any) -> list[Row]:
        """Return the rows of a query."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> Row | None:
        """Return the first row of a query; None if there is none."""
        with self._lock:
            found: Row | None = self._db.execute(query, values).fetchone()
            return found

    def change(self, statement: str, *values: Any) -> int:
        """Make a change; returns the number of rows that it has changed."""
        with self._lock:
            return self._db.execute(statement, values).rowcount

    def _value(self, query: str, *values: Any) -> Any:
        found = self.row(query, *values)
        return None if found is None else found[0]

    # Sessions

    def add_session(self, session: str, tenant: str, metadata: Mapping[str, Any], name: str | None) -> None:
        """Add a session."""
        now = time.time()
        self.change(
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, NULL)",
            session,
            tenant,
            now,
            now,
            json.dumps(metadata),
            name,
        )

    def session(self, session: str, tenant: str) -> Row | None:
        """Return a session of a tenant; None if it has none of this id."""
        return self.row("SELECT * FROM sessions WHERE id = ? AND tenant = ?", session, tenant)

    def idle_models(self, idle_s: float) -> set[str]:
        """Return the ids of models whose session has sent nothing for this many seconds."""
        query = "SELECT m.id FROM models m JOIN sessions s ON s.id = m.session WHERE s.seen < ? AND m.ended = 0"
        return {row["id"] for row in self.rows(query, time.time() - idle_s)}

    # Models

    def model(self, model: str, tenant: str) -> Row | None:
        """Return a model of a tenant that is not ended; None if it has none of this id."""
        return self.row("SELECT * FROM models WHERE id = ? AND tenant = ? AND ended = 0", model, tenant)

    def add_model(
        self, model: str, session: str, tenant: str, settings: Mapping[str, Any], metadata: Mapping[str, Any] | None
    ) -> None:
        """Add a model whose request of number 0 makes it."""
        now = time.time()
        self.change(
            "INSERT INTO models (id, session, tenant, settings, metadata, created, asked, next_seq, stepped_seq, "
            "saved_seq) VALUES (?, ?, ?, ?, ?, ?, ?, 0, -1, -1)",
            *(model, session, tenant, json.dumps(settings), json.dumps(metadata), now, now),
        )

    def num_models(self, tenant: str | None = None) -> int:
        """Count the models that are not ended, of one tenant or of all."""
        query = "SELECT COUNT(*) FROM models WHERE ended = 0 AND (? IS NULL OR tenant = ?)"
        return int(self._value(query, tenant, tenant))

    # Requests

    def add_request(self, request: str, tenant: str, scope: str, seq: int, kind: str, body: bytes) -> bool:
        """Add a request; returns False if it is there already, from an earlier try of the client."""
        with self.transaction():
            values = (request, tenant, scope, seq, kind, body, len(body), time.time())
            added = self.change(
                "INSERT OR IGNORE INTO requests (id, tenant, scope, seq, kind, body, size, arrived) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                *values,
            )
            if added:
                self.change("UPDATE models SET asked = ? WHERE id = ?", values[-1], scope)
        return bool(added)

    def request(self, request: str, tenant: str) -> Row | None:
        """Return a request of a tenant, without its body; None if it has none of this id."""
        fields = "id, tenant, scope, seq, kind, size, arrived, state, media, result, number, finished, given"
        return self.row(f"SELECT {fields} FROM requests WHERE id = ? AND tenant = ?", request, tenant)

    def body(self, request: str) -> bytes:
        """Return the body of a request."""
        return bytes(self._value("SELECT body FROM requests WHERE id = ?", request) or b"")

    def pending(self, tenant: str) -> tuple[int, int]:
        """Return the number of requests of a tenant that wait, and the number of bytes of their bodies."""
        found = self.row(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM requests WHERE state = 'pending' AND tenant = ?", tenant
        )
        assert found is not None
        return int(found[0]), int(found[1])

    def finish(self, request: str, *, state: str, media: str, result: bytes, keeps_body: bool = False) -> None:
        """Store the result of a request, which has none yet.

        Args:
            request: Id of the request.
            state: `done` or `failed`.
            media: Type of the result.
            result: Result.
            keeps_body: True if the request is made again to restore its model.
        """
        with self.transaction():
            self._number += 1
            now = time.time()
            body = "body" if keeps_body else "NULL"
            changed = self.change(
                f"UPDATE requests SET state = ?, media = ?, result = ?, number = ?, finished = ?, body = {body} "
                "WHERE id = ? AND state = 'pending'",
                *(state, media, result, self._number, now, request),
            )
            if not changed:
                return
            row = self.row("SELECT tenant, arrived FROM requests WHERE id = ?", request)
            assert row is not None
            self.count(row["tenant"], requests=1, waited_s=now - row["arrived"], failed=int(state == "failed"))

    def count(self, tenant: str, **counts: float) -> None:
        """Add to the numbers of a tenant."""
        with self.transaction():
            self.change("INSERT OR IGNORE INTO usage (tenant) VALUES (?)", tenant)
            added = ", ".join(f"{name} = {name} + ?" for name in counts)
            self.change(f"UPDATE usage SET {added} WHERE tenant = ?", *counts.values(), tenant)

    def usage(self, tenant: str) -> Row:
        """Return the numbers of a tenant."""
        self.change("INSERT OR IGNORE INTO usage (tenant) VALUES (?)", tenant)
        found = self.row("SELECT * FROM usage WHERE tenant = ?", tenant)
        assert found is not None
        return found

    def forget_results(self, *, kept_s: float) -> None:
        """Drop the results that were given to their clients this many seconds ago, and requests without any content."""
        now = time.time()
        with self.transaction():
            self.change("UPDATE requests SET result = NULL, media = 'gone' WHERE given < ?", now - kept_s)
            self.change(
                "DELETE FROM requests WHERE media = 'gone' AND body IS NULL AND given < ? AND scope NOT IN "
                "(SELECT id FROM models WHERE ended = 0)",
                now - kept_s,
            )

    # Saves of models

    def saved(self, model: str, seq: int) -> None:
        """Note that the state of a model after a request is on the disk: earlier bodies are not needed any more."""
        with self.transaction():
            self.change("UPDATE models SET saved_seq = ? WHERE id = ?", seq, model)
            self.change(
                "UPDATE requests SET body = NULL WHERE scope = ? AND seq <= ? AND state != 'pending'", model, seq
            )

    def changes_since(self, model: str, seq: int, kinds: Sequence[str] = STATE_CHANGES) -> list[Row]:
        """Return the finished requests that have changed a model after this number, in order, without bodies."""
        marks = ", ".join("?" * len(kinds))
        return self.rows(
            "SELECT id, seq, kind, body IS NOT NULL AS has_body FROM requests "
            f"WHERE scope = ? AND seq > ? AND state = 'done' AND kind IN ({marks}) "
            "ORDER BY seq",
            *(model, seq, *kinds),
        )

    # Checkpoints

    def checkpoint(self, path: str, tenant: str) -> Row | None:
        """Return a checkpoint of a tenant that has not expired; None if it has none of this path."""
        query = "SELECT * FROM checkpoints WHERE path = ? AND tenant = ? AND (expires IS NULL OR expires > ?)"
        return self.row(query, path, tenant, time.time())

    def checkpoints(self, tenant: str, model: str | None = None) -> list[Row]:
        """Return the checkpoints of a tenant that have not expired, of one model or of all, the newest first."""
        return self.rows(
            "SELECT * FROM checkpoints WHERE tenant = ? AND (? IS NULL OR model = ?) AND "
            "(expires IS NULL OR expires > ?) ORDER BY created DESC, path",
            *(tenant, model, model, time.time()),
        )

    def storage(self, tenant: str) -> int:
        """Return the number of bytes of the checkpoints of a tenant."""
        return int(self._value("SELECT COALESCE(SUM(size), 0) FROM checkpoints WHERE tenant = ?", tenant))
