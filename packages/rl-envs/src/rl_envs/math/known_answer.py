"""The right answer, from a prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rl_envs.math.config import AnswerFormat
from rl_envs.math.extraction import final_answer
from rl_envs.multiple_choice.letter import letter_of

_BARE_LETTER = re.compile(r"[A-Z]|\([A-Z]\)|\[[A-Z]\]|[A-Z][.)]|\\text\s*\{\(?[A-Z]\)?\}")
"""A known answer that makes a row multiple choice if the format is `auto`."""


@dataclass(frozen=True)
class KnownAnswers:
    """Right answers, and the format that they decide on if the config says `auto`."""

    answers: tuple[str, ...]
    answer_format: AnswerFormat


def known_answers(info: Mapping[str, Any], answer_format: AnswerFormat) -> KnownAnswers:
    """Read `info["answer"]`: text, a number, or a list of these; a box around it is removed.

    Raises:
        ValueError: If there is none, or it does not fit the format.
    """
    if "answer" not in info:
        raise ValueError(f"the math environment needs an answer in the prompt's info, which has {sorted(info)}")
    given = info["answer"]
    answers = tuple(_text(answer) for answer in (given if isinstance(given, list | tuple) else (given,)))
    if not answers:
        raise ValueError("the answer in the prompt's info is an empty list")
    if answer_format == "auto" and all(_BARE_LETTER.fullmatch(answer) for answer in answers):
        answer_format = "choice"
    if answer_format == "choice":
        letters = [letter_of(answer) for answer in answers]
        if not all(letters):
            raise ValueError(f"answer_format choice needs the letter of an option as the answer, got {answers}")
        answers = tuple(letter for letter in letters if letter)
    return KnownAnswers(answers, answer_format)


def _text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"an answer must be a string or a number, got {answer!r}")
    is_nan = isinstance(answer, str) and answer.strip().lower() == "nan"  # as CSV files have it
    if is_nan or (isinstance(answer, float) and not math.isfinite(answer)):
        raise ValueError(f"an answer must be a finite number, got {answer!r}")
    text = final_answer(f"{Decimal(answer):f}" if isinstance(answer, int) else str(answer))
    if not text:
        raise ValueError("the answer in the prompt's info is empty")
    return text
