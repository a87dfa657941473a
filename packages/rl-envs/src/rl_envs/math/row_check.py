"""Check of a row's answer before a run starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_envs.math.config import MathConfig
from rl_envs.math.form import Collection, Equation, Expression, read
from rl_envs.math.known_answer import known_answers
from rl_envs.math.number import read_number

_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+")
_SENTENCE = re.compile(r"(?:\b[^\W\d_]{2,}\b[ ,]+){3,}")


def check(info: Mapping[str, Any], config: MathConfig) -> None:
    """Raise a `ValueError` if the row has no answer that a completion can give."""
    known = known_answers(info, config.answer_format)
    if known.answer_format == "numeric" and (words := [each for each in known.answers if read_number(each) is None]):
        raise ValueError(f"answer_format numeric needs a number as answer, got {words[0]!r}")
    if known.answer_format != "choice" and (prose := [each for each in known.answers if _is_solution(each)]):
        raise ValueError(
            f"the answer {prose[0][:80]!r} is a solution in words, which no completion repeats. Put the final answer "
            r"after ####, in \boxed{}, or by itself"
        )


def _is_solution(answer: str) -> bool:
    """Return whether an answer is a sentence with a number in it rather than a number or an expression."""
    plain = _COMMAND.sub(" ", answer)
    is_sentence = any(map(str.isdigit, plain)) and _SENTENCE.search(plain) is not None
    return is_sentence and isinstance(read(answer), Expression | Collection | Equation)
