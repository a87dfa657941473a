"""The final answer in a completion."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_envs.math import dapo
from rl_envs.math.config import AnswerFormat
from rl_envs.math.number import read_number
from rl_envs.multiple_choice.letter import letter_of, stated_letter

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MARKER = re.compile(
    r"####"
    r"|\banswer\b[ \t]{0,8}(?:\*\*)?[ \t]{0,8}(?:is|are|[:=])[ \t]{0,8}[:=]?"
    r"|\bfinal(?:[ \t]{1,8}result)?\b[ \t]{0,8}(?:\*\*)?[ \t]{0,8}[:=]",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+−])?(?:(?:\d{1,3}(?:,\d{3}){1,40}(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?%)?"
)
_CLAUSE = r"as|assuming|because|giving|given|hence|in total|making|meaning|since|so|therefore|thus|when|where|which"
_REASON = re.compile(
    rf"(?:,|;|\s(?=because|since|which))\s*(?=(?:{_CLAUSE})\b)"
    rf"|\.\s+(?=(?:{_CLAUSE}|he|it|she|that|the|they|this|we)\b)",
    re.IGNORECASE,
)
"""Before what explains an answer on the same line."""
_CORRECTION = re.compile(r"\b(?:actually|and|but|correction|instead|no|not|or|rather|sorry|wait)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACE_COMMAND = re.compile(r"\\[,;:! ]")


@dataclass(frozen=True)
class Found:
    """An answer as the completion gives it.

    Args:
        text: Without box, dollar signs and full stop.
        in_box: True if it stood in a box.
    """

    text: str
    in_box: bool


def extract(completion: str, answer_format: AnswerFormat) -> Found | None:
    """The final answer in the requested format; None if there is none."""
    if answer_format == "dapo":
        answer = dapo.answer_in(completion)
        return Found(answer, in_box=False) if answer else None
    boxed = last_box(completion)
    if answer_format == "choice":
        letter = stated_letter(completion)
        return Found(letter, in_box=boxed is not None and letter_of(boxed) == letter) if letter else None
    if answer_format == "boxed" or (boxed is not None and answer_format != "plain"):
        text = _said_in(_tidy(boxed)) if boxed is not None else ""
        if answer_format == "numeric" and read_number(text) is None:
            text = _number_in(text, 0) or ""
        return Found(text, in_box=True) if text else None
    marked = _after_marker(completion)
    match answer_format:
        case "numeric":
            plain = _number_in(marked, 0) or _number_in(completion, -1)
        case _:
            plain = _last_line(completion) if marked is None else marked
            if _BOX.search(plain):  # one that was cut off before it closed
                return None
    return Found(plain, in_box=False) if plain else None


def last_box(text: str) -> str | None:
    """The contents of the last closed box, of nested ones the innermost; None if there is none. Linear in the text."""
    starts = {match.end() for match in _BOX.finditer(text) if text[match.end() : match.end() + 1] == "{"}
    if not starts:
        return None
    position = min(starts)
    opened: list[int] = []
    closed: dict[int, int] = {}
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            opened.append(position)
        elif character == "}" and opened:
            start = opened.pop()
            if start in starts:
                closed[start] = position
        position += 1
    if not closed:
        return None
    last = max(closed)
    return text[last + 1 : closed[last]]


def unboxed(answer: str) -> str:
    """A known answer without the box and dollar signs that a dataset may have around it."""
    boxed = last_box(answer)
    return _tidy(answer if boxed is None else boxed)


def _after_marker(completion: str) -> str | None:
    """The text after the last "answer is" or its like on that line, or on the next if that ends there; None without."""
    marker = None
    for marker in _MARKER.finditer(completion):  # noqa: B007  # the last one counts
        pass
    rest = "" if marker is None else completion[marker.end() :].lstrip("* \t\r\n")
    return _tidy(_without_reason(rest.splitlines()[0])) if rest else None


def _without_reason(text: str) -> str:
    """An answer without the explanation after it, unless that may correct it."""
    reason = _REASON.search(text)
    is_plain = reason is not None and reason.start() > 0 and _CORRECTION.search(text, reason.start()) is None
    return text[: reason.start()] if reason is not None and is_plain else text


def _said_in(boxed: str) -> str:
    r"""The answer of a box that holds a sentence, such as `\text{The answer is 4}`; else the box."""
    sentence = _SENTENCE.fullmatch(boxed)
    return boxed if sentence is None else _after_marker(sentence[1]) or boxed


def _last_line(completion: str) -> str:
    lines = completion.strip().splitlines()
    return _tidy(lines[-1]) if lines else ""


def _tidy(text: str) -> str:
    text = text.strip().strip("*").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        body = text.rstrip(".").rstrip()
        if len(body) > len(opening) + len(closing) and body.startswith(opening) and body.endswith(closing):
            text = body[len(opening) : -len(closing)].strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def _number_in(text: str | None, index: int) -> str | None:
    """Return the first or last number in a string."""
    numbers = _NUMBER.findall(_SPACE_COMMAND.sub("", text)) if text else []
    return numbers[index].strip() if numbers else None
