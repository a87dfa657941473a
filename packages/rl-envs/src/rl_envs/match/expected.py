"""What a row's responses are compared with; a row that no response can match is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rl_core.model_json import read_model_json
from rl_envs.match.json_schema import check_schema, contradiction


def known_texts(info: Mapping[str, Any]) -> list[str]:
    """Return the texts in `info["answer"]`, any of which is right. A whole number that columnar files made a float is
    right as `3` and as `3.0`.

    Raises:
        ValueError: If there is none, or one is empty, null, true, false or not finite.
    """
    answer = _required(info, "answer")
    answers = answer if isinstance(answer, list | tuple) and answer else (answer,)
    wholes = [int(each) for each in answers if isinstance(each, float) and each.is_integer()]
    return [_text(each) for each in (*answers, *wholes)]


def read_pattern(info: Mapping[str, Any], *, ignore_case: bool = False) -> re.Pattern[str]:
    """Return the regular expression `info["pattern"]`.

    Raises:
        ValueError: If it is missing, or not a regular expression.
    """
    pattern = _required(info, "pattern")
    if not isinstance(pattern, str):
        raise ValueError(f"the row's `pattern` must be a regular expression as a string, got {pattern!r:.80}")
    try:
        return re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the row's `pattern` is not a regular expression: {error}") from None


def known_json(info: Mapping[str, Any]) -> Any:
    """Return the JSON value in `info["answer"]`, which may be written as text.

    Raises:
        ValueError: If it is missing, or not JSON within the bounds of `read_model_json`.
    """
    return _plain_json(_required(info, "answer", is_value=True), "answer")


def known_schema(info: Mapping[str, Any]) -> Any:
    """Return the schema in `info["schema"]`, which may be written as text.

    Raises:
        ValueError: If it is missing, is not JSON, or is not a schema that `satisfies` can check.
    """
    schema = _plain_json(_required(info, "schema"), "schema")
    check_schema(schema)
    if problem := contradiction(schema):
        raise ValueError(f"no JSON satisfies the row's `schema`: {problem}")
    return schema


def _required(info: Mapping[str, Any], name: str, *, is_value: bool = False) -> Any:
    if name not in info:
        fields = ", ".join(sorted(map(str, info))) or "none"
        raise ValueError(f"the row needs the field {name!r}; its fields are {fields}")
    if info[name] is None and not is_value:
        raise ValueError(f"the row's field {name!r} is null")
    return info[name]


def _text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"an answer must be a string or a number, got {answer!r:.80}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"an answer must be a finite number, got {answer!r}")
    text = f"{Decimal(answer):f}" if isinstance(answer, int) else str(answer)  # `str` refuses more than 4,300 digits
    if not text.strip():
        raise ValueError("the row's answer is empty, so every response would match or none")
    return text


def _plain_json(value: Any, name: str) -> Any:
    try:
        return _read(value if isinstance(value, str) else json.dumps(value))
    except (ValueError, TypeError, RecursionError) as error:
        kind = "text that is not JSON" if isinstance(value, str) else "not a value of JSON"
        raise ValueError(f"the row's `{name}` is {kind}: {error}") from None


@lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    # all rollouts of a group share their row
    return read_model_json(text)
