"""What to say about a value that its field does not take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from rl_core.config.annotation import alternatives
from rl_core.config.keys import Key

_SHORT = 60
_STATED = {"literal_error", "enum", "greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of"}
_STATED |= {"too_short", "too_long", "string_too_short", "string_too_long", "none_required"}
_BOOLS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def verdict(errors: Sequence[ErrorDetails], key: Key | None, name: str) -> str:
    """What was got, what is allowed and what to do, in one line.

    Args:
        errors: what pydantic says of one key, one error per member of a union.
        key: the key, None where the type has none there.
        name: its dotted name.
    """
    first = errors[0]
    allowed = key.allowed if key is not None else ""
    if first["type"] == "missing":
        return f"must be set; allowed: {allowed}" if allowed != "section" else "this section must be there"
    if first["type"] in ("value_error", "assertion_error"):
        return str(first["ctx"]["error"]) or first["msg"]
    if not (allowed and all(e["type"].endswith(("_type", "_parsing")) or e["type"] in _STATED for e in errors)):
        said = "; ".join(dict.fromkeys(e["msg"][:1].lower() + e["msg"][1:] for e in errors))
        return f"got {show(first['input'])}: {said}"
    assert key is not None
    return f"got {show(first['input'])}; allowed: {allowed}{_remedy(first['input'], key, name)}"


def show(value: Any) -> str:
    """A value as YAML would write it on one line, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def _remedy(value: Any, key: Key, name: str) -> str:
    kinds = [kind for kind, _ in alternatives(key.annotation)]
    if value is None and key.allowed == "section":
        return "; the section is empty: take its line out, or put keys below it"
    if key.allowed == "section":
        return f"; set the keys below it, {name}.KEY"
    if value is None and not key.required:
        return f"; leave the key out for its default, {show(key.default)}"
    if isinstance(value, float) and int in kinds and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and bool in kinds:
        wanted = _BOOLS.get(value.lower(), value.lower())
        return f"; write {wanted} without quotes" if wanted in ("true", "false") else ""
    if isinstance(value, str) and {int, float} & set(kinds) and re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value, re.I):
        return "; write the number without quotes or leading zeros"
    if isinstance(value, list | dict) and str in kinds:
        return f"; to pass it as text, quote it: {name}: '...'"
    if not isinstance(value, list) and key.allowed.startswith("list of"):
        return f"; a list is written [{show(value)}]"
    return ""
