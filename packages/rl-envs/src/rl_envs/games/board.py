"""The board of a sliding puzzle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

MOVES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Directions in which a tile moves, with the place of that tile next to the gap: rows below, columns to the right."""


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
        """The tiles in order, with the gap at the end."""
        return cls((*range(1, rows * columns), 0), columns)

    @classmethod
    def read(cls, rows: Sequence[Sequence[int]]) -> Self:
        """A board from lists of numbers.

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
        """The board after a tile has moved in a direction; None if there is no such tile."""
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
