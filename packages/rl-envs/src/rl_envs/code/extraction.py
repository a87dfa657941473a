"""The program in a response."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py", "")


def program_in(response: str) -> str | None:
    """The last fenced block of Python, or else the last without a language; None if there is none."""
    blocks = [(language.lower(), body) for language, body in _BLOCK.findall(response)]
    named = [body for language, body in blocks if language in _PYTHON[:-1]]
    unnamed = [body for language, body in blocks if not language]
    chosen = named or unnamed
    return chosen[-1] if chosen and chosen[-1].strip() else None
