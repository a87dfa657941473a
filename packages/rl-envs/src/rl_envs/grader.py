"""Environments that answer or score each turn separately, and the fields of their rows in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from rl_core.errors import InfrastructureFailed
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult

C = TypeVar("C")


class TurnEnvironment(Generic[C]):
    """An environment that answers each turn without regard to others, and whose states need not be closed.

    Args:
        config: Its settings.
    """

    def __init__(self, config: C) -> None:
        self._config = config

    def turn(self, conversation: Conversation, state: Any) -> StepResult:
        """Return the result of a turn; the state is None in the first."""
        raise NotImplementedError

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        results: list[StepResult | EnvironmentFailure] = []
        for each in zip(conversations, states, strict=True):
            try:
                results.append(self.turn(*each))
            except InfrastructureFailed as error:
                # The others of the call keep their results.
                results.append(EnvironmentFailure(str(error), "process"))
        return results

    def close(self, states: Sequence[Any]) -> None:
        pass


class Grader(TurnEnvironment[C]):
    """An environment whose rollouts have one turn, which is scored."""

    def score(self, conversation: Conversation) -> StepResult:
        """Return the reward of a turn, which ends the rollout."""
        raise NotImplementedError

    def turn(self, conversation: Conversation, state: Any) -> StepResult:
        return self.score(conversation)


def fields_of(info: Mapping[str, Any]) -> str:
    """Return the names of a row's fields, for a message."""
    return ", ".join(sorted(map(str, info))) or "none"
