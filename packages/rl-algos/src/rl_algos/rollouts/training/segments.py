"""Rollouts of several segments, and plays of several rollouts: from rows of a batch to these, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import RolloutGroup

ROLLOUT = "rollout"
"""Column of a batch whose rows are segments, int64: the number of each row's rollout, increasing from 0. The rows of a
rollout are consecutive."""

PLAY = "play"
"""Column of a batch with plays of several rollouts, int64: the number of each row's play, increasing from 0."""


def rollout_numbers(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return int64 `[rows]`, the column `rollout` of the rollouts of these groups."""
    return np.repeat(np.arange(sum(len(group.rollouts) for group in groups)), _num_rows(groups))


def play_numbers(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return int64 `[rows]`, the column `play` of the rollouts of these groups."""
    plays = [(number, play) for number, group in enumerate(groups) for play in group.rollouts.plays]
    is_first = [number == 0 or plays[number] != plays[number - 1] for number in range(len(plays))]
    return np.repeat(np.cumsum(is_first) - 1, _num_rows(groups))


def whole_rollouts(column: Ragged, groups: Sequence[RolloutGroup]) -> Ragged:
    """Return a token-aligned column with a row per rollout, its segments end to end, instead of a row per segment.

    Args:
        column: `[tokens]`, by rows of the batch.
        groups: Groups of the rollouts of the column, in order.
    """
    return column.joined(_num_rows(groups)) if any(group.rollouts.segments for group in groups) else column


def to_rows(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Return values `[rollouts]` at every row of the batch."""
    return values[batch.array(ROLLOUT)] if ROLLOUT in batch else values


def token_rows(batch: Batch, column: Ragged) -> Ragged:
    """Return a token-aligned column of whole rollouts as rows of the batch."""
    if ROLLOUT not in batch:
        return column
    return Ragged(column.values, np.concatenate([[0], np.cumsum(batch.lengths)]))


def rows_by_rollout(batch: Batch) -> Ragged:
    """Return int64, the rows of each rollout of a batch."""
    return _rows_by(batch, ROLLOUT)


def rows_by_play(batch: Batch) -> Ragged:
    """Return int64, the rows of each play of a batch."""
    return _rows_by(batch, PLAY if PLAY in batch else ROLLOUT)


def _rows_by(batch: Batch, column: str) -> Ragged:
    """Return the rows of each value of a column of ascending numbers; without the column, every row is one value."""
    rows = np.arange(len(batch))
    if column not in batch:
        return Ragged(rows, np.arange(len(batch) + 1))
    is_first = np.diff(batch.array(column), prepend=-1) != 0
    return Ragged(rows, np.append(np.flatnonzero(is_first), len(batch)))


def _num_rows(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return int64 `[rollouts]`, the number of rows of each."""
    return np.array([len(lengths) for group in groups for lengths in group.rollouts.row_lengths], dtype=np.int64)
