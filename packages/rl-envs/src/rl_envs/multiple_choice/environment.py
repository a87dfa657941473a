"""The `multiple_choice` environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.environment import Conversation, StepResult
from rl_envs.math.extraction import extract
from rl_envs.multiple_choice.config import MultipleChoiceConfig
from rl_envs.multiple_choice.row_check import right_letters


class MultipleChoiceEnvironment:
    """Scores a single turn by the letter in its last box, behind "answer is" or its like, or that stands alone."""

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._config = config
        self._letters = [chr(ord("A") + index) for index in range(config.num_choices)]

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        known = right_letters(conversation.info, self._config)
        found = extract(conversation.completion, "choice")
        letter = found.text if found is not None and found.text in self._letters else ""
        correct = float(letter in known)
        info = {"accuracy": correct, "answer": letter}
        if not self._config.format_reward:
            return StepResult(reward=correct, info=info)
        formed = self._config.format_reward if letter else 0.0
        return StepResult(reward={"reward": correct + formed, "correct": correct, "format": formed}, info=info)
