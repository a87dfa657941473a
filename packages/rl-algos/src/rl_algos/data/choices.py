"""Processors of multiple choice: the options are part of the question, the answer is the letter of one.

Columns are those of the datasets' cards on the hub; `rl_algos.data.hub_datasets` says which dataset has which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_uppercase
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, column, text_column
from rl_algos.data.permutation import permutation
from rl_core.errors import DataError

TEMPLATE = "{question}\n\n{options}\n\nEnd with the letter of the right option, as in: Answer: A"
"""The text of every multiple-choice question; `prompt_file` puts another one around it."""

_GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def multiple_choice(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`question`, the options in `choices` (MMLU, arXiv:2009.03300) or `options` (MMLU-Pro, arXiv:2406.01574), and the
    right one in `answer`: its number from 0, or its letter."""
    options = column(row, "choices" if "choices" in row else "options")
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
        raise DataError(f"the options must be a list of 2 to {len(ascii_uppercase)} strings, got {options!r}")
    return question(text_column(row, "question"), options, _number(column(row, "answer"), len(options)))


def gpqa(row: Mapping[str, Any], _settings: DatasetConfig) -> Example:
    """`Question`, `Correct Answer` and `Incorrect Answer 1` to `3`; the order of the options depends only on
    their strings, so it is the same in every run (GPQA, arXiv:2311.12022)."""
    text = text_column(row, "Question").strip()
    options = [text_column(row, name).strip() for name in ("Correct Answer", *_GPQA_WRONG)]
    seed = int.from_bytes(blake2b("\n".join([text, *options]).encode(), digest_size=8).digest(), "big")
    order = permutation(len(options), seed).tolist()
    return question(text, [options[place] for place in order], order.index(0))


def question(text: str, options: Sequence[Any], right: int) -> Example:
    """A question with its options, lettered, of which the one of number `right` is the answer."""
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    content = TEMPLATE.replace("{options}", listed).replace("{question}", text.strip())
    return Example(({"role": "user", "content": content},), ascii_uppercase[right])


def _number(answer: Any, num_options: int) -> int:
    """The number of the right option, from 0."""
    number = -1
    if isinstance(answer, int) and not isinstance(answer, bool):
        number = answer
    elif isinstance(answer, str) and len(answer.strip()) == 1:
        number = ascii_uppercase.find(answer.strip().upper())
    if not 0 <= number < num_options:
        last = ascii_uppercase[num_options - 1]
        raise DataError(f"the answer must be a letter from A to {last} or a number from 0, got {answer!r}")
    return number
