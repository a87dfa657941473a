"""The `instructions` environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.instructions.asked import instructions_of, is_followed
from rl_envs.instructions.config import InstructionsConfig


class InstructionsEnvironment:
    """Scores a single turn by the instructions of its row."""

    def __init__(self, config: InstructionsConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _score(self, conversation: Conversation) -> StepResult:
        try:
            asked = instructions_of(conversation.info)
            followed = [is_followed(name, conversation.final_text, arguments) for name, arguments in asked]
        except ValueError as error:
            raise UnusableAnswer(str(error)) from None
        share = sum(followed) / len(followed)
        strict = float(all(followed))
        missed = [name for (name, _), done in zip(asked, followed, strict=True) if not done]
        reward = share if self._config.reward == "share" else strict
        return StepResult(reward=reward, info={"accuracy": strict, "followed": share, "missed": ", ".join(missed)})
