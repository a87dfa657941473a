"""Comparison of a problem with the fields that a test expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.config import Problem

MENTIONS = "mentions"
"""Key of the words, such as keys and numbers, that the reason or the remedy contains."""


def assert_fields(problem: Problem, key: str, fields: Mapping[str, Any]) -> None:
    """Compare the key of a problem, the fields that are given, and the words that it mentions."""
    assert problem.key == key
    compared = {name: value for name, value in fields.items() if name != MENTIONS}
    assert {name: getattr(problem, name) for name in compared} == compared
    said = f"{problem.reason}. {problem.remedy}"
    assert [word for word in fields.get(MENTIONS, ()) if word not in said] == [], said
