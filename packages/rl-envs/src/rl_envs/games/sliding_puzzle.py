"""The environment `sliding_puzzle`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.board import MOVES, Board
from rl_envs.games.config import SlidingPuzzleConfig

_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Position:
    """A game under way.

    Args:
        board: Its tiles.
        num_moves: Turns so far.
    """

    board: Board
    num_moves: int = 0


class SlidingPuzzle:
    """Takes the last direction in a turn as its move.

    The row's `board` is the start, a list of rows with 0 for the gap.
    """

    def __init__(self, config: SlidingPuzzleConfig) -> None:
        self._config = config

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._move(turn, state or _start(turn)) for turn, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def save(self, states: Sequence[Position]) -> list[bytes | None]:
        """The boards and numbers of moves."""
        return [json.dumps([each.board.rows, each.num_moves]).encode() for each in states]

    def restore(self, saved: Sequence[bytes]) -> list[Position]:
        """Games as they were saved."""
        return [Position(Board.read(rows), num_moves) for rows, num_moves in map(json.loads, saved)]

    def _move(self, turn: Conversation, position: Position) -> StepResult:
        directions = _MOVE.findall(turn.final_text)
        board = position.board.moved(directions[-1].lower()) if directions else None
        num_moves = position.num_moves + 1
        info = {"accuracy": 0.0, "moves": num_moves}
        if board is not None and board.is_solved:
            return StepResult(reward=self._config.solved_reward, info=info | {"accuracy": 1.0})
        reward = 0.0 if board is not None else self._config.invalid_reward
        if num_moves == self._config.max_moves:
            return StepResult(reward=reward, info=info)
        shown = str(board or position.board)
        said = shown if board is not None else f"That is not a possible move: write up, down, left or right.\n{shown}"
        return StepResult(
            reward=reward,
            done=False,
            observation=({"role": "user", "content": said},),
            state=Position(board or position.board, num_moves),
            info=info,
        )


def _start(turn: Conversation) -> Position:
    if "board" not in turn.info:
        fields = ", ".join(sorted(map(str, turn.info))) or "none"
        raise UnusableAnswer(f"the row needs the field 'board'; its fields are {fields}")
    try:
        return Position(Board.read(turn.info["board"]))
    except (TypeError, ValueError) as error:
        raise UnusableAnswer(str(error)) from None
