"""Conversations of users in a file that survives the processes of a run."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl_algos.rollouts.driver.saved import packed_turns, unpacked_turns
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion

T = TypeVar("T")

Outcome = Literal["open", "rewarded", "expired", "left_out"]
"""State of a conversation: it takes calls, or why it has ended."""

Posted = Literal["accepted", "repeated", "unknown", "rewarded", "expired", "left_out"]
"""Result of a reward that was posted. All but the first two refuse it, because of the conversation's state."""

BUSY_TIMEOUT_S = 30.0
"""Maximum number of seconds that a transaction waits for other processes."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, task TEXT NOT NULL,
    called REAL NOT NULL, ended REAL, outcome TEXT NOT NULL DEFAULT 'open', rewards TEXT, place INTEGER
);
CREATE INDEX IF NOT EXISTS by_outcome ON conversations (outcome, place, called);
CREATE INDEX IF NOT EXISTS by_place ON conversations (place);
CREATE INDEX IF NOT EXISTS by_name ON conversations (name);
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT NOT NULL, dialect TEXT NOT NULL, body BLOB NOT NULL,
    answer TEXT NOT NULL, digest TEXT NOT NULL, completions BLOB NOT NULL, UNIQUE (conversation, answer)
);
CREATE INDEX IF NOT EXISTS by_digest ON calls (digest);
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, verdict TEXT NOT NULL, score REAL, decided REAL);
"""


@dataclass(frozen=True)
class KeptCall:
    """A call that was answered.

    Args:
        dialect: Path of the request below `/v1/`.
        body: The request.
        answer: Id of the answer.
        digest: Digest of the conversation up to the answer, which a call that continues it begins with.
        completions: The sampled completions by the digests of their requests, also of calls at the same time.
    """

    dialect: str
    body: bytes
    answer: str
    digest: str
    completions: Mapping[str, Completion]


@dataclass(frozen=True)
class KeptConversation:
    """A conversation without its calls.

    Args:
        id: Id of the conversation.
        task: Name of its task; empty for none.
        outcome: Its state.
        rewards: Rewards by name; empty unless it is rewarded.
    """

    id: str
    task: str
    outcome: Outcome
    rewards: Mapping[str, float]


class ConversationStore:
    """The conversations of a run, in a SQLite file that all rollout workers of the run share.

    A conversation is open until a reward is posted for it, its deadline passes, or it is left out. Conversations that
    have ended are given to training in the order in which they ended, each under one place: `take` decides about a
    place once, and gives the same conversations for the place ever after, in whatever process. A transaction is on the
    disk when its method returns, so an answer or a reward that a client has seen confirmed outlives the end of every
    process.

    The file is readable by its owner only, and deleted entries are overwritten.

    Args:
        path: Path of the file, in a folder that all nodes share. Its file system must have locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # SQLite's calls block, and one thread keeps their order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="conversations")

    async def open(self) -> None:
        """Open the file, and create it if there is none.

        Raises:
            sqlite3.Error: If it is not such a file.
        """
        await self._run(self._open)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        self._database = sqlite3.connect(self._path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for setting in ("synchronous=FULL", "secure_delete=ON", "auto_vacuum=INCREMENTAL"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(_SCHEMA)

    async def close(self) -> None:
        """Close the file."""
        with suppress(AttributeError):
            await self._run(lambda: self._database.close())
        self._thread.shutdown()

    async def add(self, name: str, task: str) -> str:
        """Open a conversation, and return its id.

        Args:
            name: The client's name of it; empty for none.
            task: Name of the task; empty for none.
        """
        made = secrets.token_hex(8)
        fields = "INSERT INTO conversations (id, name, task, called) VALUES (?, ?, ?, ?)"
        await self._run(self._write, fields, made, name, task, time.time())
        return made

    async def find(self, *, name: str = "", digests: Sequence[str] = ()) -> str:
        """Return the id of the open conversation that a call belongs to; empty if there is none.

        Args:
            name: The client's name of it.
            digests: Digests of the call's conversation up to each message, without the last, instead of a name. The
                longest that is known counts, if only one open conversation has it.
        """

        def found() -> str:
            if name:
                by_name = "SELECT id FROM conversations WHERE name = ? AND outcome = 'open' ORDER BY number DESC"
                rows = self._read(by_name, name)
                return str(rows[0][0]) if rows else ""
            for digest in reversed(digests):
                rows = self._read(
                    "SELECT DISTINCT calls.conversation FROM calls JOIN conversations ON calls.conversation = "
                    "conversations.id WHERE calls.digest = ? AND conversations.outcome = 'open' LIMIT 2",
                    digest,
                )
                if rows:
                    return str(rows[0][0]) if len(rows) == 1 else ""
            return ""

        return await self._run(found)

    async def conversation(self, id: str) -> KeptConversation | None:
        """Return a conversation; None if there is none with this id."""

        def found() -> KeptConversation | None:
            rows = self._read("SELECT id, task, outcome, rewards FROM conversations WHERE id = ?", id)
            return _conversation(rows[0]) if rows else None

        return await self._run(found)

    async def num_calls(self, id: str) -> int:
        """Return the number of calls of a conversation."""
        count = "SELECT COUNT(*) FROM calls WHERE conversation = ?"
        return int(await self._run(lambda: self._read(count, id)[0][0]))

    async def num_open(self) -> int:
        """Return the number of open conversations."""
        count = "SELECT COUNT(*) FROM conversations WHERE outcome = 'open'"
        return int(await self._run(lambda: self._read(count)[0][0]))

    async def calls(self, id: str) -> list[KeptCall]:
        """Return the calls of a conversation, in the order of their answers."""

        def found() -> list[KeptCall]:
            fields = (
                "SELECT dialect, body, answer, digest, completions FROM calls WHERE conversation = ? ORDER BY number"
            )
            return [
                KeptCall(dialect, zlib.decompress(body), answer, digest, unpacked_turns(completions)[0].completions)
                for dialect, body, answer, digest, completions in self._read(fields, id)
            ]

        return await self._run(found)

    async def keep(self, id: str, call: KeptCall) -> bool:
        """Keep a call of an open conversation, whose deadline begins anew. Return False if it has ended meanwhile."""
        values = (
            call.dialect,
            zlib.compress(call.body, 1),
            call.answer,
            call.digest,
            packed_turns([RolloutTurns(call.completions)]),
        )

        def kept() -> bool:
            with self._transaction():
                called = "UPDATE conversations SET called = ? WHERE id = ? AND outcome = 'open'"
                if not self._database.execute(called, (time.time(), id)).rowcount:
                    return False
                fields = "(conversation, dialect, body, answer, digest, completions)"
                add = f"INSERT OR IGNORE INTO calls {fields} VALUES (?, ?, ?, ?, ?, ?)"
                self._database.execute(add, (id, *values))
                return True

        return await self._run(kept)

    async def reward(self, id: str, name: str, rewards: Mapping[str, float], deadline_s: float) -> Posted:
        """End a conversation with its rewards, unless it has ended.

        Args:
            id: Id of the conversation; empty to find it by its name.
            name: The client's name of it; the newest of this name is rewarded.
            rewards: Rewards by name.
            deadline_s: Seconds after the last call until which rewards are taken.
        """
        written = json.dumps(dict(rewards), sort_keys=True)

        def posted() -> Posted:
            with self._transaction():
                key, value = ("id", id) if id else ("name", name)
                fields = f"SELECT id, called, outcome, rewards FROM conversations WHERE {key} = ? ORDER BY number DESC"
                row = next(iter(self._read(fields, value)), None)
                if row is None:
                    return "unknown"
                own, called, outcome, earlier = row
                if outcome == "rewarded":
                    # A client that did not get the answer posts the same again.
                    return "repeated" if earlier == written else "rewarded"
                if outcome != "open":
                    return "left_out" if outcome == "left_out" else "expired"
                if called + deadline_s < time.time():
                    return "expired"
                end = "UPDATE conversations SET outcome = 'rewarded', rewards = ?, ended = ? WHERE id = ?"
                self._database.execute(end, (written, time.time(), own))
                return "accepted"

        return await self._run(posted)

    async def leave_out(self, id: str) -> None:
        """End an open conversation that its user does not want to be trained on, and delete its calls."""

        def left() -> None:
            with self._transaction():
                end = "UPDATE conversations SET outcome = 'left_out', ended = ? WHERE id = ? AND outcome = 'open'"
                if self._database.execute(end, (time.time(), id)).rowcount:
                    self._database.execute("DELETE FROM calls WHERE conversation = ?", (id,))

        await self._run(left)

    async def take(self, place: int, size: int) -> list[KeptConversation]:
        """Return the conversations of a place; none while too few have ended. The first call that finds some decides.

        Args:
            place: Place in the order of training, from 0.
            size: Number of conversations of a place. Above 1 they have the same task. An expired one has a place alone.
        """
        fields = "SELECT id, task, outcome, rewards FROM conversations WHERE"

        def taken() -> list[KeptConversation]:
            with self._transaction():
                rows = self._read(f"{fields} place = ? ORDER BY number", place)
                if not rows:
                    rows = self._next(fields, size)
                    mark = "UPDATE conversations SET place = ? WHERE id = ?"
                    self._database.executemany(mark, [(place, row[0]) for row in rows])
                return [_conversation(row) for row in rows]

        return await self._run(taken)

    def _next(self, fields: str, size: int) -> list[Any]:
        """Return the rows of the conversations that have ended and get the next place; none if there are too few."""
        waiting = "place IS NULL AND ended IS NOT NULL AND outcome"
        expired = self._read(f"{fields} {waiting} = 'expired' ORDER BY ended, number LIMIT 1")
        if expired or size == 1:
            return expired or self._read(f"{fields} {waiting} = 'rewarded' ORDER BY ended, number LIMIT 1")
        full = (
            f"SELECT task FROM conversations WHERE {waiting} = 'rewarded' GROUP BY task HAVING COUNT(*) >= ? "
            "ORDER BY MIN(ended) LIMIT 1"
        )
        found = self._read(full, size)
        chosen = f"{fields} {waiting} = 'rewarded' AND task = ? ORDER BY ended, number LIMIT ?"
        return self._read(chosen, found[0][0], size) if found else []

    async def tidy(self, deadline_s: float, retention_s: float, size: int) -> None:
        """End conversations whose deadline has passed, and delete the calls of those that ended long ago.

        Args:
            deadline_s: Seconds after the last call after which a conversation gets no reward. With several
                conversations of a place, one that waits as long for others of its task has expired too.
            retention_s: Seconds after its end for which a conversation's calls are kept.
            size: Number of conversations of a place.
        """
        now = time.time()

        def done() -> None:
            with self._transaction():
                late = "UPDATE conversations SET outcome = 'expired', ended = ? WHERE"
                self._database.execute(f"{late} outcome = 'open' AND called < ?", (now, now - deadline_s))
                if size > 1:
                    single = f"{late} outcome = 'rewarded' AND place IS NULL AND ended < ?"
                    self._database.execute(single, (now, now - deadline_s))
                old = "DELETE FROM calls WHERE conversation IN (SELECT id FROM conversations WHERE ended < ?)"
                if self._database.execute(old, (now - retention_s,)).rowcount:
                    self._database.execute(
                        "UPDATE conversations SET name = '', task = '' WHERE ended < ?", (now - retention_s,)
                    )
            self._database.execute("PRAGMA incremental_vacuum(64)").fetchall()

        await self._run(done)

    async def counts(self) -> Mapping[str, int]:
        """Return the number of conversations by their state; `waiting` are rewarded and not yet given to training."""

        def found() -> Mapping[str, int]:
            rows = self._read("SELECT outcome, COUNT(*) FROM conversations GROUP BY outcome")
            waiting = "SELECT COUNT(*) FROM conversations WHERE outcome = 'rewarded' AND place IS NULL"
            none = dict.fromkeys(("open", "rewarded", "expired", "left_out"), 0)
            return {**none, **dict(rows), "waiting": self._read(waiting)[0][0]}

        return await self._run(found)

    async def set_verdict(self, version: int, verdict: str, score: float | None = None) -> None:
        """Note the verdict about a weight version: `tried` while it is not known, `served` or `taken back`.

        Later versions of an earlier run, which ended before it saved them, are forgotten.
        """

        def noted() -> None:
            with self._transaction():
                self._database.execute("DELETE FROM versions WHERE version >= ?", (version,))
                row = (version, verdict, score, time.time())
                self._database.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", row)

        await self._run(noted)

    async def verdict(self, version: int) -> str:
        """Return the verdict about a weight version; empty without one."""
        fields = "SELECT verdict FROM versions WHERE version = ?"
        rows = await self._run(lambda: self._read(fields, version))
        return str(rows[0][0]) if rows else ""

    def _read(self, statement: str, *values: Any) -> list[Any]:
        return self._database.execute(statement, values).fetchall()

    def _write(self, statement: str, *values: Any) -> None:
        with self._transaction():
            self._database.execute(statement, values)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        # A transaction ends although its client has hung up.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function, *args))


class _Transaction:
    """Everything in the context is written, or nothing. It takes the file's lock at once, so that it never has to
    begin again because another process was faster."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *error: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def _conversation(row: Sequence[Any]) -> KeptConversation:
    id, task, outcome, rewards = row
    return KeptConversation(id, task, outcome, json.loads(rewards) if rewards else {})
