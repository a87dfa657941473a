"""Experts that tokens were sent to, for groups of rollouts that have none because all of them failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_core.data.batch import Batch, RemoteRows
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_core.rollouts.rollout import unknown_routing


@dataclass(frozen=True, eq=False)
class UnknownRouting:
    """A `rl_core.data.batch.RowStore` of unknown routing, made by the process that reads it.

    Args:
        lengths: int64 `[rows]`, tokens of each row.
        shape: Layers and experts per token.
    """

    lengths: np.ndarray
    shape: tuple[int, ...]

    def fetch(self) -> Batch:
        """Make the column."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        return Batch({ROUTED_EXPERTS: Ragged(unknown_routing(int(offsets[-1]), self.shape), offsets)})


def with_routing(batches: Sequence[Batch]) -> list[Batch]:
    """The same columns, and in all of them `routed_experts` if one has it, marked as unknown if it was not reported.

    Args:
        batches: Columns of groups of rollouts, with `tokens`.
    """
    known = next((batch for batch in batches if ROUTED_EXPERTS in batch), None)
    if known is None or all(ROUTED_EXPERTS in batch for batch in batches):
        return list(batches)
    # of one group, and only when another one failed as a whole
    shape = known.ragged(ROUTED_EXPERTS).values.shape[1:]

    def filled(batch: Batch) -> Batch:
        rows = RemoteRows.of(UnknownRouting(batch.lengths, shape), batch.lengths)
        return batch.with_columns(rows.columns([ROUTED_EXPERTS]))

    return [batch if ROUTED_EXPERTS in batch else filled(batch) for batch in batches]
