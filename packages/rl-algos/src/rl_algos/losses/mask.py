"""Tokens and sequences that a loss counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import LOSS_MASK

DEMONSTRATION = "demonstration"
"""Column of the rows that the policy did not sample, uint8 `[rows]`: 1 for a response of a dataset under `loss_mask`, 0
for a rollout."""


def without_demonstrations(batch: Batch) -> Batch:
    """Return the batch with an empty loss mask in the rows of demonstrations: the mask of sampled tokens."""
    if DEMONSTRATION not in batch:
        return batch
    return batch.with_zeros(LOSS_MASK, batch.array(DEMONSTRATION) > 0)


def loss_mask(batch: Batch) -> Ragged:
    """Return uint8 `[tokens]`, the column `loss_mask`.

    Raises:
        ValueError: If it is set at the first token of a row, whose logprob does not exist.
    """
    mask = batch.ragged(LOSS_MASK)
    filled = np.flatnonzero(mask.lengths)
    wrong = filled[mask.values[mask.offsets[:-1][filled]] != 0]
    if len(wrong):
        raise ValueError(
            f"loss_mask is 1 at the first token of {len(wrong)} of {len(mask)} rows, the first of them row {wrong[0]}. "
            "Set it to 0, because a first token is not predicted from anything"
        )
    return mask


def num_masked(batch: Batch) -> float:
    """Count the tokens under the mask; see `loss_mask` for errors."""
    return float(loss_mask(batch).values.sum(dtype=np.int64))


def num_observed(batch: Batch) -> float:
    """Count the tokens between the first and the last one under the mask of each row that are not under it: what an
    environment answered between two turns, with the marks of the chat template around it."""
    mask = batch.ragged(LOSS_MASK)
    spans = [places[-1] - places[0] + 1 - len(places) for row in mask if len(places := np.flatnonzero(row))]
    return float(sum(spans))


def by_sequence(batch: Batch, column: Ragged) -> Ragged:
    """Return a token-aligned column with a row per sequence: consecutive rows of equal `pair` are joined end to end."""
    if PAIR not in batch:
        return column
    first = np.flatnonzero(np.diff(batch.array(PAIR), prepend=-1))
    return column.joined(np.diff(first, append=len(batch)))


class LossByToken:
    """Base of losses that are divided by the number of tokens under `loss_mask`."""

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Return the `tokens` under the mask."""
        return {"tokens": num_masked(batch)}
