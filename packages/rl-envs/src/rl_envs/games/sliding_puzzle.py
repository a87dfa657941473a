"""The environment `sliding_puzzle`, and its board."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rl_core.rollouts.environment import Conversation, StepResult, UnusableAnswer
from rl_envs.games.plugin import SlidingPuzzleConfig
from rl_envs.grader import TurnEnvironment, fields_of

MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Directions of moves, with the place of the tile next to the gap: rows below, columns to the right."""


@dataclass(frozen=True)
class Board:
    """Tiles row by row, 0 for the gap.

    Args:
        tiles: A permutation of 0 to rows times columns minus 1.
        columns: Tiles in a row.
    """

    tiles: tuple[int, ...]
    columns: int

    @classmethod
    def solved_of(cls, rows: int, columns: int) -> Self:
        """Return the tiles in order, with the gap at the end."""
        return cls((*range(1, rows * columns), 0), columns)

    @classmethod
    def read(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Return a board from lists of numbers.

        Raises:
            ValueError: If they are not the numbers of a board.
        """
        tiles = tuple(tile for row in rows for tile in row)
        if len({len(row) for row in rows}) != 1 or sorted(tiles) != list(range(len(tiles))) or len(tiles) < 4:
            raise ValueError(f"a board has rows of equal length with the numbers 0 to n, got {rows!r:.80}")
        return cls(tiles, len(rows[0]))

    @property
    def is_solved(self) -> bool:
        """Return whether the tiles are in order, with the gap at the end."""
        return self.tiles == (*range(1, len(self.tiles)), 0)

    @property
    def rows(self) -> list[list[int]]:
        """The tiles as lists of numbers."""
        return [list(self.tiles[start : start + self.columns]) for start in range(0, len(self.tiles), self.columns)]

    def moved(self, direction: str) -> Board | None:
        """Return the board after a tile has moved in a direction; None if there is no such tile."""
        row, column = divmod(self.tiles.index(0), self.columns)
        below, right = MOVES[direction]
        row_of_tile, column_of_tile = row + below, column + right
        if not (0 <= row_of_tile < len(self.tiles) // self.columns and 0 <= column_of_tile < self.columns):
            return None
        gap, tile = row * self.columns + column, row_of_tile * self.columns + column_of_tile
        tiles = list(self.tiles)
        tiles[gap], tiles[tile] = tiles[tile], 0
        return Board(tuple(tiles), self.columns)

    def __str__(self) -> str:
        width = len(str(len(self.tiles) - 1))
        return "\n".join(" ".join(f"{tile or '_':>{width}}" for tile in row) for row in self.rows)


_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)


class SlidingPuzzle(TurnEnvironment[SlidingPuzzleConfig]):
    """Takes the last direction in a turn as its move.

    The row's `board` is the start, a list of rows with 0 for the gap. The state is the board and the number of turns.
    """

    def save(self, states: Sequence[tuple[Board, int]]) -> list[bytes | None]:
        """Return the boards and numbers of moves."""
        return [json.dumps([board.rows, num_moves]).encode() for board, num_moves in states]

    def restore(self, saved: Sequence[bytes]) -> list[tuple[Board, int]]:
        """Return games as they were saved."""
        return [(Board.read(rows), num_moves) for rows, num_moves in map(json.loads, saved)]

    def turn(self, conversation: Conversation, state: tuple[Board, int] | None) -> StepResult:
        before, num_before = state or (_start(conversation), 0)
        directions = _MOVE.findall(conversation.final_text)
        board = before.moved(directions[-1].lower()) if directions else None
        num_moves = num_before + 1
        info = {"accuracy": 0.0, "moves": num_moves}
        if board is not None and board.is_solved:
            return StepResult(reward=self._config.solved_reward, info=info | {"accuracy": 1.0})
        reward = 0.0 if board is not None else self._config.invalid_reward
        if num_moves == self._config.max_moves:
            return StepResult(reward=reward, info=info)
        said = str(board or f"That is not a possible move: write up, down, left or right.\n{before}")
        asked = ({"role": "user", "content": said},)
        return StepResult(reward=reward, done=False, observation=asked, state=(board or before, num_moves), info=info)


def _start(turn: Conversation) -> Board:
    if "board" not in turn.info:
        raise UnusableAnswer(f"the row needs the field 'board'; its fields are {fields_of(turn.info)}")
    try:
        return Board.read(turn.info["board"])
    except (TypeError, ValueError) as error:
        raise UnusableAnswer(str(error)) from None
