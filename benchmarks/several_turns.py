"""An environment of several turns, for estimators that compare turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core import Conversation, StepResult


class Letters:
    """Ask for the digits of the row's letters, one in every turn, and reward the third answer only."""

    COUNTED = 2
    ALL = "abcdefgh"

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._answer(turn, turn.info["letters"]) for turn in conversations]

    def _answer(self, turn: Conversation, letters: str) -> StepResult:
        is_right = turn.completion.strip() == str(self.ALL.index(letters[turn.turn]))
        following = turn.turn + 1
        if following == len(letters):
            return StepResult()
        asked = ({"role": "user", "content": letters[following]},)
        return StepResult(float(is_right and turn.turn == self.COUNTED), done=False, observation=asked)

    def close(self, states: Sequence[Any]) -> None:
        """Do nothing: conversations have no states."""
