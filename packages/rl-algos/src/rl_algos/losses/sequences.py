"""The sequences of a loss: rows, or the segments of rollouts."""

from __future__ import annotations

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged


def by_sequence(batch: Batch, column: Ragged) -> Ragged:
    """A token-aligned column with a row per sequence: rows of equal `pair`, which lie side by side, end to end."""
    if PAIR not in batch:
        return column
    first = np.flatnonzero(np.diff(batch.array(PAIR), prepend=-1))
    return column.joined(np.diff(first, append=len(batch)))
