"""Check of a row's answer, pattern or schema before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs.match.config import MatchConfig
from rl_envs.match.expected import known_json, known_schema, known_texts, read_pattern


def check(info: Mapping[str, Any], config: MatchConfig) -> None:
    """Raise a `ValueError` if the row lacks what its responses are compared with, or no response can match it."""
    match config.mode:
        case "exact" | "contains":
            known_texts(info)
        case "regex":
            read_pattern(info)
        case "json":
            known_json(info)
        case "json_schema":
            known_schema(info)
