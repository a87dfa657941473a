"""The final answer in a completion."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl_envs.math import dapo
from rl_envs.math.config import AnswerFormat
from rl_envs.math.number import read_number

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MARKER = re.compile(
    r"####"
    r"|\banswer\b[ \t]*(?:\*\*)?[ \t]*(?:is|are|[:=])[ \t]*[:=]?"
    r"|\bfinal(?:[ \t]+result)?\b[ \t]*(?:\*\*)?[ \t]*[:=]",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?(?:\s?%)?"
)
_SPACE_COMMAND = re.compile(r"\\[,;:! ]")
_LETTER = re.compile(r"(?:option|choice)?\s*[(\[]?\s*([A-Za-z])\s*(?:[)\].:].*)?", re.IGNORECASE | re.DOTALL)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_CHOICE_ALONE = re.compile(r"(?m)^[ \t]*\**([A-Z])\**(?:[.:)][^\n]*)?$|\(([A-Z])\)")


@dataclass(frozen=True)
class Found:
    """An answer as the completion gives it.

    Args:
        text: without box, dollar signs and full stop.
        in_box: whether it stood in a box.
    """

    text: str
    in_box: bool


def extract(completion: str, answer_format: AnswerFormat) -> Found | None:
    """The final answer in the requested format; None if there is none."""
    if answer_format == "dapo":
        answer = dapo.answer_in(completion)
        return Found(answer, in_box=False) if answer else None
    boxed = last_box(completion)
    if answer_format == "boxed" or (boxed is not None and answer_format != "plain"):
        text = _tidy(boxed) if boxed is not None else ""
        if answer_format == "choice":
            text = letter_of(text) or ""
        elif answer_format == "numeric" and read_number(text) is None:
            text = _number_in(text, 0) or ""
        return Found(text, in_box=True) if text else None
    marked = _after_marker(completion)
    match answer_format:
        case "choice":
            plain = _letter_in(completion, marked)
        case "numeric":
            plain = _number_in(marked, 0) or _number_in(completion, -1)
        case _:
            plain = _last_line(completion) if marked is None else marked
            if _BOX.search(plain):  # one that was cut off before it closed
                return None
    return Found(plain, in_box=False) if plain else None


def last_box(text: str) -> str | None:
    """The contents of the last closed box; None if there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        content = _braced(text, match.end())
        if content is not None:
            inner = last_box(content)
            return content if inner is None else inner
    return None


def unboxed(answer: str) -> str:
    """A known answer without the box and dollar signs that a dataset may have around it."""
    boxed = last_box(answer)
    return _tidy(answer if boxed is None else boxed)


def letter_of(text: str) -> str | None:
    """The option's letter, upper case, in `B`, `(b)`, `B) 12`, `\\text{B}`, `Option B`; None in anything else."""
    bare = _WRAPPER.sub(r"\1", text).replace("**", "").strip().strip("$").strip()
    match = _LETTER.fullmatch(bare)
    return match[1].upper() if match else None


def _braced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it."""
    if text[start : start + 1] != "{":
        return None
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start + 1 : position]
        position += 1
    return None


def _after_marker(completion: str) -> str | None:
    """The text after the last "answer is" or its like on that line, or on the next if that ends there; None without."""
    marker = None
    for marker in _MARKER.finditer(completion):  # noqa: B007  # the last one counts
        pass
    rest = "" if marker is None else completion[marker.end() :].lstrip("* \t\r\n")
    return _tidy(rest.splitlines()[0]) if rest else None


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


def _letter_in(completion: str, marked: str | None) -> str | None:
    """The letter after the marker, or else the last one that stands alone."""
    letter = None if marked is None else letter_of(marked)
    if letter is not None:
        return letter
    alone = _CHOICE_ALONE.findall(completion)
    return next(filter(None, alone[-1])) if alone else letter_of(completion)


def _number_in(text: str | None, index: int) -> str | None:
    """The first or last number in a text."""
    numbers = _NUMBER.findall(_SPACE_COMMAND.sub("", text)) if text else []
    return numbers[index].strip() if numbers else None
