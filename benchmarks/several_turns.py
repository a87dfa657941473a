"""Environments of several turns, for estimators that compare turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rl_core import Conversation, StepResult

NUM_TURNS = 3
MAX_OPERAND = 49


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


class Sums:
    """Ask for a sum in every turn, and reward each answer; the accuracy is the share of right ones."""

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._answer(turn, state or {}) for turn, state in zip(conversations, states, strict=True)]

    def _answer(self, turn: Conversation, state: dict[str, Any]) -> StepResult:
        is_right = turn.completion.strip() == state.get("answer", str(turn.info["answer"]))
        num_right = state.get("num_right", 0) + is_right
        # All rollouts of a group are asked the same sums, whatever they have answered.
        drawn = random.Random(f"{turn.messages[0]['content']} {turn.turn}")
        a, b = drawn.randint(0, MAX_OPERAND), drawn.randint(0, MAX_OPERAND)
        return StepResult(
            reward=is_right / NUM_TURNS,
            done=turn.turn + 1 == NUM_TURNS,
            observation=({"role": "user", "content": f"{a}+{b}="},),
            state={"answer": str(a + b), "num_right": num_right},
            info={"accuracy": num_right / NUM_TURNS},
        )

    def close(self, states: Sequence[Any]) -> None:
        """Do nothing: states hold no resources."""
