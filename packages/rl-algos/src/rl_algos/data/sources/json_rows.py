"""Rows that are written as JSON, with reasons in words if one cannot be read."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rl_core.errors import DataError

LINE_IS_ROW = "one line is one row: write each object on a line by itself, or all of them in an array of a .json file"


def json_row(line: bytes) -> dict[str, Any]:
    """Return the object of a line; raise a `DataError` with the reason if the line is not one."""
    try:
        row = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON object: {_reason(line, error)}") from None
    if not isinstance(row, dict):
        raise DataError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


def json_array(content: bytes, name: str) -> list[Any]:
    """Return the items of an array; raise a `DataError` with the file and the line if it is not one."""
    try:
        rows = json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{name}{where}: not a JSON array: {_reason(b'', error)}") from None
    if not isinstance(rows, list):
        raise DataError(f"{name}: not a JSON array, but {type(rows).__name__}")
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is there twice; remove one")
    return made


def _reason(line: bytes, error: Exception) -> str:
    """Return the reason in words, with the column and the remedy if there is a usual one."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8 ({error})"
    if isinstance(error, RecursionError):
        return "its lists and objects are nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        is_long = "set_int_max_str_digits" in str(error)
        return "an integer has more than 4300 digits; write it as a string" if is_long else str(error)
    problem = error.msg.removesuffix(" at")
    is_cut = line.strip() in (b"{", b"[") or (line and error.pos >= len(line.rstrip()))
    remedy = ""
    if "control character" in problem:
        remedy = r"; write \t for a tab and \n for a line break in a string"
    elif is_cut or problem.startswith("Extra data"):
        remedy = f"; {LINE_IS_ROW}"
    elif "property name enclosed in double quotes" in problem and b"'" in line:
        remedy = "; JSON has double quotes, as json.dumps writes them"
    elif "Illegal trailing comma" in problem or "property name" in problem or problem.startswith("Expecting value"):
        remedy = "; JSON has no trailing comma, no comment and no unquoted text"
    return f"{problem} at column {error.colno}{remedy}"
