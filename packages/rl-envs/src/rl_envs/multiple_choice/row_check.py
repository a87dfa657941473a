"""The right letters of a row, checked before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from rl_envs.math.known_answer import known_answers
from rl_envs.multiple_choice.config import MultipleChoiceConfig


def right_letters(info: Mapping[str, Any], config: MultipleChoiceConfig) -> tuple[str, ...]:
    """Return the right letters of a row; raise a `ValueError` if they are missing, or not among the options."""
    known = known_answers(info, "choice").answers
    if not set(known) <= set(ascii_uppercase[: config.num_choices]):
        raise ValueError(f"the answer {'/'.join(known)} is not one of {config.num_choices} options")
    return known


def check(info: Mapping[str, Any], config: MultipleChoiceConfig) -> None:
    """Raise a `ValueError` if the row's answer is not the letter of an option."""
    right_letters(info, config)
