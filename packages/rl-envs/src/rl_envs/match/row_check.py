"""Check of a row's answer, pattern or schema before a run starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from rl_envs.match.config import MatchConfig


def check(info: Mapping[str, Any], config: MatchConfig) -> None:
    """Raise a `ValueError` if the row lacks what its responses are compared with, or no response can match it."""
    match config.mode:
        case "exact" | "contains":
            answer = _required(info, "answer")
            for each in answer if isinstance(answer, list | tuple) and answer else (answer,):
                _check_text(each)
        case "regex":
            try:
                re.compile(str(_required(info, "pattern")))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"the row's `pattern` is not a regular expression: {error}") from None
        case "json":
            _check_json(_required(info, "answer", is_value=True), "answer")
        case "json_schema":
            _check_json(_required(info, "schema"), "schema")


def _required(info: Mapping[str, Any], name: str, *, is_value: bool = False) -> Any:
    if name not in info:
        fields = ", ".join(sorted(map(str, info))) or "none"
        raise ValueError(f"the row needs the field {name!r}; its fields are {fields}")
    if info[name] is None and not is_value:
        raise ValueError(f"the row's field {name!r} is null")
    return info[name]


def _check_text(answer: Any) -> None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"an answer must be text or a number, got {answer!r:.80}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"an answer must be a finite number, got {answer!r}")
    if not str(answer).strip():
        raise ValueError("the row's answer is empty, so every response would match or none")


def _check_json(value: Any, name: str) -> None:
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row's `{name}` is text that is not JSON: {error}") from None
