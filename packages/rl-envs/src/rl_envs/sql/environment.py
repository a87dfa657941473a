"""The environment `sql`, and its check of rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.fences import fenced_blocks
from rl_envs.grader import Grader, fields_of
from rl_envs.sql.database import QueryFailed, database_path, run_query
from rl_envs.sql.plugin import SQLConfig

_DIGITS = 9
"""Number of significant digits in which two numbers that are not whole must agree."""
_STRINGS = re.compile(r"'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|`[^`]*(?:`|\Z)|\[[^\]]*(?:\]|\Z)")
"""Strings and names in quotation marks; one that is not closed lasts to the end."""
_ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)
_STARTS = re.compile(r"^\s*(?:select|with|values)\b", re.IGNORECASE)


class SQLEnvironment(Grader[SQLConfig]):
    """Scores a single turn by the result of its last SQL: the last fenced block of SQL, else the last without a
    language, else the whole final text if it begins as a query does."""

    def score(self, conversation: Conversation) -> StepResult:
        try:
            path, answer = _asked(conversation.info, self._config)
            expected = _expected(path, answer, self._config.max_instructions, self._config.max_rows)
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        query = sql_in(conversation.final_text)
        info = {"unparsed": float(query is None), "executed": 0.0, "accuracy": 0.0, "error": ""}
        if query is None:
            return StepResult(reward=0.0, info=info)
        try:
            limits = {"max_instructions": self._config.max_instructions, "max_rows": self._config.max_rows}
            rows = run_query(path, query, **limits)
        except QueryFailed as error:
            return StepResult(reward=0.0, info={**info, "error": str(error)[:200]})
        is_ordered = self._config.match == "rows" and has_outer_order(answer)
        right = float(are_equal(rows, expected, is_ordered=is_ordered, are_counted=self._config.match == "rows"))
        return StepResult(reward=right, info={**info, "executed": 1.0, "accuracy": right})


def sql_in(text: str) -> str | None:
    """Return the SQL of a response; None if there is none."""
    blocks = list(fenced_blocks(text))
    named = [body for language, body in blocks if language in ("sql", "sqlite", "sqlite3")]
    plain = [body for language, body in blocks if not language]
    if found := named or plain:
        return found[-1].strip() or None
    return text.strip() if not blocks and _STARTS.match(text) else None


def has_outer_order(query: str) -> bool:
    """Return whether the rows of a query have an order: it has ORDER BY outside of parentheses."""
    bare = _STRINGS.sub("''", query)
    while (inner := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = inner
    return _ORDER_BY.search(bare) is not None


def are_equal(
    rows: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]], *, is_ordered: bool, are_counted: bool
) -> bool:
    """Return whether two results are the same.

    Args:
        rows: One result.
        expected: The other.
        is_ordered: True if the order of rows counts.
        are_counted: True if equal rows count each.
    """
    first, second = ([tuple(map(_comparable, row)) for row in result] for result in (rows, expected))
    if is_ordered:
        return first == second
    return Counter(first) == Counter(second) if are_counted else set(first) == set(second)


def check_row(info: Mapping[str, Any], config: SQLConfig) -> None:
    """Check that the query of a row has a result.

    Raises:
        ValueError: If it does not.
    """
    path, answer = _asked(info, config)
    _expected(path, answer, config.max_instructions, config.max_rows)


def _asked(info: Mapping[str, Any], config: SQLConfig) -> tuple[Path, str]:
    """Return the database of a row, and its query."""
    if config.databases is None:
        raise ValueError("`databases` of the environment sql must be set to the folder of the databases")
    for name in ("db_id", "answer"):
        if not isinstance(info.get(name), str):
            raise ValueError(f"the row needs the field {name!r}, a string; its fields are {fields_of(info)}")
    return database_path(config.databases, info["db_id"]), info["answer"]


@lru_cache(maxsize=512)
def _expected(path: Path, query: str, max_instructions: int, max_rows: int) -> list[tuple[Any, ...]]:
    try:
        return run_query(path, query, max_instructions=max_instructions, max_rows=max_rows)
    except QueryFailed as error:
        raise ValueError(f"the query of the row, {query!r:.200}, has no result: {error}") from None


def _comparable(value: Any) -> Hashable:
    """Return a value that equals another one if a reader would take both for the same."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.{_DIGITS}g}"
    return value  # None, an int, a whole float, a string or bytes
