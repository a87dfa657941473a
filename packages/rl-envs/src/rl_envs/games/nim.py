"""The environment `nim`, a game of two players."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.config import NimConfig

PLAYERS = ("first", "second")
"""Names of the agents, in the order in which they begin."""

_NUMBER = re.compile(r"\d{1,6}")


@dataclass(frozen=True)
class Pile:
    """A game under way.

    Args:
        stones: Stones that are left.
        max_take: Maximum number of stones of a move.
        mover: Index of the player whose turn it is.
        choices: Of each player, the moves so far from a pile that can be won.
        best: Of each player, how many of those were the winning move.
    """

    stones: int
    max_take: int
    mover: int = 0
    choices: tuple[int, int] = (0, 0)
    best: tuple[int, int] = field(default=(0, 0))

    def counted(self, move: int) -> Pile:
        """The same game, with a move counted for its player's `accuracy`."""
        winning = self.stones % (self.max_take + 1)
        if not winning:
            return self
        return replace(
            self,
            choices=_raised(self.choices, self.mover, 1),
            best=_raised(self.best, self.mover, int(move == winning)),
        )


class Nim:
    """Takes the last number in a turn as the stones that the player removes; who takes the last stone wins.

    The row's `pile` is the number of stones, and `max_take` how many a player may remove. The players are the agents
    `first` and `second`; each sees the stones that are left before its turn. The row's `instructions`, if it has them,
    come before the stones that the second player sees first, as they do in the prompt of the first player.
    """

    def __init__(self, config: NimConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [
            self._move(turn, state or _start(turn), is_known=state is not None)
            for turn, state in zip(conversations, states, strict=True)
        ]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _move(self, turn: Conversation, pile: Pile, *, is_known: bool) -> StepResult:
        numbers = _NUMBER.findall(turn.final_text)
        move = int(numbers[-1]) if numbers else 0
        is_valid = 1 <= move <= min(pile.max_take, pile.stones)
        pile = pile.counted(move)
        agent, other = PLAYERS[pile.mover], PLAYERS[1 - pile.mover]
        info: dict[str, Any] = {"valid": float(is_valid)}
        if pile.choices[pile.mover]:
            info["accuracy"] = pile.best[pile.mover] / pile.choices[pile.mover]
        if not is_valid:
            return StepResult(reward=self._config.invalid_reward, agent=agent, info=info)
        left = pile.stones - move
        explained = "" if is_known else str(turn.info.get("instructions", ""))
        if not left:
            lost = {other: self._config.lost_reward}
            return StepResult(reward=self._config.won_reward, agent=agent, agent_rewards=lost, info=info)
        return StepResult(
            done=False,
            observation=({"role": "user", "content": f"{explained}{left}"},),
            state=replace(pile, stones=left, mover=1 - pile.mover),
            info=info,
            agent=agent,
            next_agent=other,
        )


def _raised(counts: tuple[int, int], player: int, by: int) -> tuple[int, int]:
    return (counts[0] + by, counts[1]) if player == 0 else (counts[0], counts[1] + by)


def _start(turn: Conversation) -> Pile:
    stones, max_take = _positive(turn.info, "pile"), _positive(turn.info, "max_take")
    return Pile(stones, max_take)


def _positive(info: Mapping[str, Any], name: str) -> int:
    try:
        number = int(info[name])
    except (KeyError, TypeError, ValueError):
        number = 0
    if number < 1:
        raise UnusableAnswer(f"the row's `{name}` must be a whole number above 0, got {info.get(name)!r}")
    return number
