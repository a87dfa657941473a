"""Words of command lines and of interpolations as values."""

from __future__ import annotations

import re
from typing import Any

from rl_core.config.tree import MAX_DIGITS

FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_INTEGER = re.compile(r"[-+]?\d+")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def scalar(text: str) -> Any:
    """The number, truth value or null that a word is, else the word."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > MAX_DIGITS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else text
