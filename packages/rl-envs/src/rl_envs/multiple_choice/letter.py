"""The letter of an option: as a known answer, and as a completion states it."""

from __future__ import annotations

import re

_LETTER = re.compile(r"(?:option|choice)?\s*[(\[]?\s*([A-Za-z])\s*(?:[)\].:].*)?", re.IGNORECASE | re.DOTALL)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_CHOICE_ALONE = re.compile(r"(?m)^[ \t]*\**([A-Z])\**(?:[.:)][^\n]*)?$|\(([A-Z])\)")
_MARKER = re.compile(r"\banswer\b[ \t*]*(?:is|are|[:=])[ \t:=*]*([^\n]*)|\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", re.I)


def letter_of(text: str) -> str | None:
    """Return the letter, upper case, of `B`, `(b)`, `B) 12`, `\\text{B}` or `Option B`; None for anything else."""
    bare = _WRAPPER.sub(r"\1", text).replace("**", "").strip().strip("$").strip()
    match = _LETTER.fullmatch(bare)
    return match[1].upper() if match else None


def stated_letter(completion: str) -> str | None:
    """Return the letter that a completion states as its final answer; None if it states none, or several."""
    marked = [letter_of((plain or boxed).strip().strip("*.")) for plain, boxed in _MARKER.findall(completion)]
    letters = [letter for letter in marked if letter]
    if letters:
        return letters[-1]
    alone = _CHOICE_ALONE.findall(completion)
    return next(filter(None, alone[-1])) if alone else letter_of(completion)
