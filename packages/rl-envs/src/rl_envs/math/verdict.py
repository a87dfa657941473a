"""Comparison of an answer with the known one."""

from __future__ import annotations

import re

from rl_envs.math.config import AnswerFormat
from rl_envs.math.dapo import normalised
from rl_envs.math.number import read_number

_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '-][A-Za-z]+)*")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SKIPPED = re.compile(r"\\left|\\right|\\[,;:! ]|\s+|\$")


def is_correct(found: str, known: str, answer_format: AnswerFormat) -> bool:
    """Whether an answer equals the known one.

    Equal texts are equal; two numbers are compared exactly and by nothing else; words are compared as words; what is
    left is parsed as mathematics and compared symbolically.
    """
    if answer_format == "dapo":
        return normalised(found) == normalised(known)
    if answer_format == "choice" or _bare(found) == _bare(known):
        return _bare(found) == _bare(known)
    number, known_number = read_number(found), read_number(known)
    if number is not None and known_number is not None:
        return number.equals(known_number)
    if answer_format == "numeric":
        if known_number is None:
            raise ValueError(f"answer_format numeric needs a number as answer, got {known!r}")
        return False
    words, known_words = _words(found), _words(known)
    if words is not None and known_words is not None:
        return words == known_words
    if words is not None and known_number is not None:
        return False
    # sympy takes a second to import, which numbers need not pay
    from rl_envs.math.symbolic import are_equal

    return are_equal(found, known)


def _bare(text: str) -> str:
    return _SKIPPED.sub("", text)


def _words(text: str) -> str | None:
    plain = _TEXT.sub(r"\1", text).strip()
    return plain.casefold() if _WORDS.fullmatch(plain) else None
