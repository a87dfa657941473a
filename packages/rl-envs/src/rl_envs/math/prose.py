"""Numbers in sentences, for answers that are not marked as such."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_envs.math.form import Equation, read
from rl_envs.math.number import Number, read_number
from rl_envs.math.unit import sized

MAX_LENGTH = 5000
"""Number of characters at the end of a completion that are searched for a number."""

_WORD = re.compile(r"\S+")
_EDGES = "*.,;:?\"'`"
_MATH = re.compile(r"[\d\\=+*/^×÷−√π½¼¾|]|^[-–]$|^[b-zA-HJ-Z]$")
_JOINED = frozenset(["and", "or", "to"])
_APPLIED = frozenset(["squared", "cubed", "factorial", "times", "plus", "minus", "over", "percent"])
"""Words after a number that make it another one."""


@dataclass(frozen=True)
class _Span:
    """Neighbouring words that are not prose, with the positions of the first and of the word after the last."""

    text: str
    start: int
    end: int


def is_number(text: str) -> bool:
    """Return whether a string is a number as a whole, or an equation that gives one."""
    form = read(text)
    return isinstance(form, Number) or (isinstance(form, Equation) and isinstance(form.values[-1], Number))


def only_number(text: str) -> str | None:
    """Return the number in a sentence that has only one; None if it has none, several, or more mathematics."""
    words, spans = _spans(text)
    return _whole(words, spans[0]) if len(spans) == 1 else None


def last_number(completion: str) -> str | None:
    """Return the last number of a completion; None if it is part of something else, such as `3x` or `3 or 4`."""
    tail = completion[-MAX_LENGTH:]
    if len(completion) > MAX_LENGTH:
        # a number could be cut
        tail = tail.partition(" ")[2]
    words, spans = _spans(tail)
    if not spans:
        return None
    last = spans[-1]
    is_joined = len(spans) > 1 and last.start - spans[-2].end == 1 and words[last.start - 1] in _JOINED
    return None if is_joined else _whole(words, last)


def _spans(text: str) -> tuple[list[str], list[_Span]]:
    words = [word for found in _WORD.finditer(text) if (word := _trimmed(found[0]))]
    spans: list[_Span] = []
    for index, word in enumerate(words):
        if _MATH.search(word) is None:
            continue
        if spans and spans[-1].end == index:
            spans[-1] = _Span(f"{spans[-1].text} {word}", spans[-1].start, index + 1)
        else:
            spans.append(_Span(word, index, index + 1))
    return words, spans


def _trimmed(word: str) -> str:
    """Return a word without marks of a sentence around it; a point before a digit is that of a decimal."""
    return word.lstrip("*,;:?\"'`").rstrip(_EDGES)


def _whole(words: Sequence[str], span: _Span) -> str | None:
    after = words[span.end : span.end + 3]
    for size in range(len(after), 0, -1):
        text = " ".join((span.text, *after[:size]))
        if read_number(text) is not None:
            return text
    if after and (after[0].casefold() in _APPLIED or any(sized(word.casefold()) is not None for word in after)):
        return None
    return span.text if is_number(span.text) else None
