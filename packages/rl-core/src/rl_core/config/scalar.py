"""Unquoted scalars of YAML and of the command line, which keep the text that the user typed.

`model_name=1e5` must reach a text field as `1e5` and a number field as 100000.0, also through an interpolation. Which
of the two it is, only the schema says, so the value carries its text until it meets one.
"""

from __future__ import annotations

import re
from typing import Any, Final

_INT = re.compile(r"[-+]?(?:0|[1-9]\d*(?:_\d+)*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\d\.|\.\d)[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

MISSING: Final = "???"
"""An unquoted value that says: whoever uses this file must set it."""


class Unset:
    """The value of a key marked `???`."""

    def __repr__(self) -> str:
        return MISSING


class PlainInt(int):
    """An int and the text it was written as."""

    text: str

    def __new__(cls, text: str) -> PlainInt:
        value = super().__new__(cls, int(text.replace("_", ""), 0))
        value.text = text
        return value

    def __str__(self) -> str:
        return self.text


class PlainFloat(float):
    """A float and the text it was written as."""

    text: str

    def __new__(cls, text: str) -> PlainFloat:
        value = super().__new__(cls, _SPECIAL.get(text.lower(), text.replace("_", "")))
        value.text = text
        return value

    def __str__(self) -> str:
        return self.text


class PlainBool(int):
    """A truth value and the text it was written as."""

    text: str

    def __new__(cls, text: str) -> PlainBool:
        value = super().__new__(cls, _BOOL[text])
        value.text = text
        return value

    def __str__(self) -> str:
        return self.text


def read_scalar(text: str) -> Any:
    """The value of an unquoted scalar by YAML 1.2's rules: `1e5` is a float, `no`, `010` and `3:30:00` are text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return PlainBool(text)
    if _INT.fullmatch(text):
        return PlainInt(text)
    if text.lower() in _SPECIAL or _FLOAT.fullmatch(text):
        return PlainFloat(text)
    return Unset() if text == MISSING else text


def natural(value: Any) -> Any:
    """The value without the text it was written as, all the way down."""
    match value:
        case PlainBool():
            return bool(value)
        case PlainInt():
            return int(value)
        case PlainFloat():
            return float(value)
        case dict():
            return {key: natural(item) for key, item in value.items()}
        case list():
            return [natural(item) for item in value]
        case _:
            return value
