"""The `multiple_choice` environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.multiple_choice.config import MultipleChoiceConfig
from rl_envs.multiple_choice.letter import stated_letter
from rl_envs.multiple_choice.row_check import right_letters


class MultipleChoiceEnvironment:
    """Scores a single turn by the letter that it states as its answer (`stated_letter`)."""

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
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
