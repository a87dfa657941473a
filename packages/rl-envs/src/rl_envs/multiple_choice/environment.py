"""The environment `multiple_choice`, and its check of rows."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.grader import Grader, fields_of
from rl_envs.multiple_choice.letter import letter_of, stated_letter
from rl_envs.multiple_choice.plugin import MultipleChoiceConfig


class MultipleChoiceEnvironment(Grader[MultipleChoiceConfig]):
    """Scores a single turn by the letter that it states as its answer (`stated_letter`)."""

    def score(self, conversation: Conversation) -> StepResult:
        try:
            known = right_letters(conversation.info, self._config)
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        letter = stated_letter(conversation.final_text, self._config.num_choices)
        correct = float(letter in known)
        info = {"accuracy": correct, "answer": letter or "", "unparsed": float(letter is None)}
        if not self._config.format_reward:
            return StepResult(reward=correct, info=info)
        formed = self._config.format_reward if letter else 0.0
        return StepResult(reward={"reward": correct + formed, "correct": correct, "format": formed}, info=info)


def right_letters(info: Mapping[str, Any], config: MultipleChoiceConfig) -> tuple[str, ...]:
    """Return the right letters in `info["answer"]`.

    Raises:
        ValueError: If there is none, or one is not the letter of an option.
    """
    if "answer" not in info:
        raise ValueError(f"the row needs the field 'answer'; its fields are {fields_of(info)}")
    given = info["answer"]
    answers = given if isinstance(given, list | tuple) else (given,)
    if not answers:
        raise ValueError("the row's `answer` is an empty list")
    letters = []
    for answer in answers:
        letter = letter_of(answer) if isinstance(answer, str) else None
        if letter is None:
            raise ValueError(
                f"`answer` must be the letter of an option, such as 'B', got {answer!r:.80}. If any of several letters "
                "is right, write them as a list; answers of several letters together are not supported"
            )
        if letter not in ascii_uppercase[: config.num_choices]:
            raise ValueError(f"the answer {letter} is not one of {config.num_choices} options (num_choices)")
        letters.append(letter)
    return tuple(letters)
