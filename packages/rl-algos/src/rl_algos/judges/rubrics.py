"""Rubrics: the questions that language models are asked about rollouts, and the rewards that follow from verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from rl_core.environments.config import JudgedRewardConfig

DEFAULT_RUBRIC = "How well does the response do what the last message of the conversation asks for?"
"""Rubric of a reward that has none."""

MAX_RUBRIC_BYTES = 2**20
"""Maximum size of the file of a rubric."""

_FILES = (".md", ".txt")


@dataclass(frozen=True)
class Rubric:
    """A reward by a judge, with the text of its rubric.

    Args:
        judge: Name of the judge.
        text: Template of the rubric, with `{field}` for the fields of a row.
        form: Form of a verdict.
        low: Smallest reward by a language model.
        high: Largest reward by a language model.
        compare: Responses that a pairwise verdict compares with: `group`, or the field of the row with a text.
        each: Part of a rollout that has a reward of its own.
        weight: Weight in the sum of rewards.
    """

    judge: str
    text: str = DEFAULT_RUBRIC
    form: Literal["number", "ranking", "pairwise"] = "number"
    low: float = 0.0
    high: float = 1.0
    compare: str = "group"
    each: Literal["rollout", "turn", "token"] = "rollout"
    weight: float = 1.0

    @classmethod
    def read(cls, reward: JudgedRewardConfig) -> Rubric:
        """Return the rubric of a reward. Its file is read here, on the driver.

        Raises:
            ValueError: If the file cannot be read, or the text is not a template.
        """
        text = reward.rubric or DEFAULT_RUBRIC
        if text.endswith(_FILES) and "\n" not in text:
            text = _file_text(text)
        fields_of(text)
        return cls(
            reward.judge,
            text,
            reward.form,
            *reward.range,
            compare=reward.compare,
            each=reward.each,
            weight=reward.weight,
        )

    @property
    def needs_group(self) -> bool:
        """True if the responses to a prompt are compared with each other."""
        return self.form == "ranking" or (self.form == "pairwise" and self.compare == "group")

    def filled(self, info: Mapping[str, Any]) -> str:
        """Return the text with the fields of a row.

        Raises:
            KeyError: If the row does not have a field.
        """
        raise NotImplementedError


def _file_text(path: str) -> str:
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_RUBRIC_BYTES:
            raise ValueError(f"is larger than {MAX_RUBRIC_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}). Write a file that exists, or the rubric itself") from None


def fields_of(template: str) -> tuple[str, ...]:
    """Return the names of the fields of a template, in order.

    Raises:
        ValueError: If it is not a template: a brace without its partner, or a field without a name.
    """
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"is not a template ({error}). Write {{{{ and }}}} for braces") from None
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(
            f"has the field {{{wrong[0]}}}, but fields have names such as {{answer}}. Write {{{{ and }}}} for braces"
        )
    return tuple(dict.fromkeys(names))
