"""Environments that score single turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult


class Grader:
    """An environment whose rollouts have one turn, which is scored without regard to others."""

    def score(self, conversation: Conversation) -> StepResult:
        """Return the reward of a turn, which ends the rollout."""
        raise NotImplementedError

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self.score(conversation) for conversation in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass
