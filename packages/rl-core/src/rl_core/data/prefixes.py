"""Tokens that rows begin with in common, so that each is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SAVED = 0.1
"""Minimum share of a row's tokens that it must have in common with another, so that they are computed once. Below it,
the kernels for equal numbers of queries and keys are faster."""


class SharedPrefixes(NamedTuple):
    """Rows in the order of their tokens, so that rows with a common prefix follow one another.

    Together they are a tree in depth-first order: each row adds the tokens after its shared ones to the branch that it
    leaves.

    Args:
        order: Int64 `[rows]`, the rows in that order.
        shared: Int64 `[rows]`, number of tokens that each of them, in that order, begins with as the one before it
            does; 0 if that is less than `MIN_SAVED` of them.
    """

    order: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, offsets: np.ndarray, columns: Sequence[np.ndarray]) -> SharedPrefixes:
        """Return the prefixes that rows share.

        Args:
            offsets: Int64 `[rows + 1]`, where rows start and end.
            columns: Tokens of the rows, int `[tokens]`, and other columns `[tokens, *inner]` that rows must agree in
                to share a token.
        """
        starts, ends = offsets[:-1].tolist(), offsets[1:].tolist()
        # Big-endian bytes have the order of the numbers, and rows come right after their own prefixes.
        tokens = columns[0].astype(">i4")
        keys = [tokens[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0] * len(order)
        for place in range(1, len(order)):
            (first, size), (second, own) = (
                (starts[row], ends[row] - starts[row]) for row in order[place - 1 : place + 1]
            )
            length = min(size, own)
            for column in columns:
                differs = column[first : first + length] != column[second : second + length]
                if differs.any():
                    # `argmax` finds the first token that differs; inner axes are flattened behind it.
                    length = int(differs.reshape(length, -1).any(1).argmax())
            shared[place] = length if length >= MIN_SAVED * own else 0
        return cls(np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64))

    def runs(self, lengths: np.ndarray, max_tokens: int) -> list[tuple[list[int], int]]:
        """Cut the rows, in their order, into runs that share prefixes and fit into a microbatch.

        Args:
            lengths: Int64 `[rows]`, tokens of each row.
            max_tokens: Maximum number of different tokens of a run with several rows.

        Returns:
            Rows of each run, and its number of different tokens.
        """
        cut: list[tuple[list[int], int]] = []
        for row, shared in zip(self.order.tolist(), self.shared.tolist(), strict=True):
            length = int(lengths[row])
            if shared and cut[-1][1] + length - shared <= max_tokens:
                rows, tokens = cut[-1]
                rows.append(row)
                cut[-1] = rows, tokens + length - shared
            else:
                cut.append(([row], length))
        return cut
