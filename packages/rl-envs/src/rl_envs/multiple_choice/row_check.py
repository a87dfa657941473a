"""The right letters of a row, checked before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from rl_envs.multiple_choice.config import MultipleChoiceConfig
from rl_envs.multiple_choice.letter import letter_of


def right_letters(info: Mapping[str, Any], config: MultipleChoiceConfig) -> tuple[str, ...]:
    """Return the letters in `info["answer"]`, any of which is right.

    Raises:
        ValueError: If there is none, or one is not the letter of an option.
    """
    if "answer" not in info:
        fields = ", ".join(sorted(map(str, info))) or "none"
        raise ValueError(f"the row needs the field 'answer'; its fields are {fields}")
    given = info["answer"]
    answers = given if isinstance(given, list | tuple) else (given,)
    if not answers:
        raise ValueError("the row's `answer` is an empty list")
    return tuple(_letter(answer, config.num_choices) for answer in answers)


def check(info: Mapping[str, Any], config: MultipleChoiceConfig) -> None:
    """Raise a `ValueError` if the row's answer is not the letter of an option."""
    right_letters(info, config)


def _letter(answer: Any, num_choices: int) -> str:
    letter = letter_of(answer) if isinstance(answer, str) else None
    if letter is None:
        raise ValueError(
            f"`answer` must be the letter of an option, such as 'B', got {answer!r:.80}. If any of several letters is "
            "right, write them as a list; answers of several letters together are not supported"
        )
    if letter not in ascii_uppercase[:num_choices]:
        raise ValueError(f"the answer {letter} is not one of {num_choices} options (num_choices)")
    return letter
