"""Check of a row's answer before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs.math.config import MathConfig
from rl_envs.math.known_answer import known_answers
from rl_envs.math.number import read_number


def check(info: Mapping[str, Any], config: MathConfig) -> None:
    """Raise a `ValueError` if the row has no answer that a completion can give."""
    known = known_answers(info, config.answer_format)
    if known.answer_format == "numeric" and (words := [each for each in known.answers if read_number(each) is None]):
        raise ValueError(f"answer_format numeric needs a number as answer, got {words[0]!r}")
