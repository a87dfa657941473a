"""The environment `guess_number`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.config import GuessNumberConfig

_NUMBER = re.compile(r"(?<![\w.])-?\d{1,12}(?![\w.]*\d)")


class GuessNumber:
    """Takes the last whole number in a turn as the guess; the row's `answer` is the number.

    The state is the number of guesses.
    """

    def __init__(self, config: GuessNumberConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._guess(turn, state or 0) for turn, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def save(self, states: Sequence[int]) -> list[bytes | None]:
        """The numbers of guesses."""
        return [str(num_guesses).encode() for num_guesses in states]

    def restore(self, saved: Sequence[bytes]) -> list[int]:
        """The numbers of guesses."""
        return [int(data) for data in saved]

    def _guess(self, turn: Conversation, num_before: int) -> StepResult:
        number = _answer(turn)
        found = _NUMBER.findall(turn.final_text)
        guess = int(found[-1]) if found else None
        info = {"accuracy": float(guess == number), "guesses": num_before + 1}
        if guess == number:
            return StepResult(reward=self._config.discount**num_before, info=info)
        if num_before + 1 == self._config.max_guesses:
            return StepResult(reward=0.0, info=info)
        hint = "Write a whole number." if guess is None else "higher" if guess < number else "lower"
        return StepResult(done=False, observation=({"role": "user", "content": hint},), state=num_before + 1, info=info)


def _answer(turn: Conversation) -> int:
    try:
        return int(turn.info["answer"])
    except (KeyError, TypeError, ValueError):
        raise UnusableAnswer(f"the row's `answer` must be a whole number, got {turn.info.get('answer')!r}") from None
