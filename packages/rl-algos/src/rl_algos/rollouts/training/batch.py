"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.training.rewards import are_cut
from rl_algos.rollouts.training.segments import (
    PLAY,
    ROLLOUT,
    play_numbers,
    rollout_numbers,
    rows_by_play,
    to_rows,
    token_rows,
)
from rl_core.data.batch import Batch, Column, RemoteRows, image_column
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.images import IMAGES
from rl_core.rollouts.group import LOSS_MASK, RECORD, ROUTED_EXPERTS, RolloutGroup
from rl_core.rollouts.rollout import unknown_routing

Advantages = np.ndarray | Ragged
"""float64, `[rollouts]` or token-aligned `[tokens]`."""


def build_batch(groups: Sequence[RolloutGroup], config: RolloutConfig) -> Batch:
    """Build a batch with one row per rollout, or per segment if the config splits rollouts, with the column `rollout`.
    It has `tokens`, `loss_mask` and `generation_logprobs` by token. If plays have several rollouts, it has `play`.

    If rollouts have images, there is the column `images`, empty in rows without any.

    Rollouts that train nothing (failed; cut off, with overlong filtering) have an empty loss mask. The token-aligned
    columns stay where they are.

    Raises:
        ConfigError: If rollouts have several segments, and the config does not allow it.
    """
    parts = with_images(with_routing([group.columns for group in groups]))
    shared = set.intersection(*(set(part) for part in parts)) - {RECORD}
    names = [name for name in parts[0] if name in shared]
    batch = Batch.concat([part.only(names) for part in parts])
    if config.splits:
        batch = batch.with_columns({ROLLOUT: rollout_numbers(groups)})
    elif any(group.rollouts.segments for group in groups):
        raise ConfigError(
            f"{config.section}.rewritten_history: the program {config.rollout_program} returned rollouts of several "
            "segments; set this key to `split`, so that these count as one rollout"
        )
    if any(group.rollouts.play for group in groups):
        batch = batch.with_columns({PLAY: play_numbers(groups)})
    if config.overlong_filtering:
        batch = batch.with_zeros(LOSS_MASK, to_rows(batch, are_cut(groups, config.turn_limit)))
    return batch


def with_advantages(batch: Batch, advantages: Advantages) -> Batch:
    """Return the batch with `advantages`, float32 by row or by token; all rows of a rollout have the same."""
    if isinstance(advantages, Ragged):
        single: Column = token_rows(batch, advantages.like(advantages.values.astype(np.float32)))
    else:
        single = to_rows(batch, advantages.astype(np.float32))
    return batch.with_columns({"advantages": single})


def minibatches(batch: Batch, num_plays: int) -> Iterator[Batch]:
    """Yield consecutive parts with this number of plays, one optimizer step each; the last may be smaller.

    A play is one rollout, or all rollouts that a rollout program returned together. A step then makes the same number
    of updates however many rollouts its plays have.
    """
    rows = rows_by_play(batch)
    for start in range(0, len(rows), num_plays):
        end = min(start + num_plays, len(rows))
        yield batch.select(rows.values[rows.offsets[start] : rows.offsets[end]])


def passes(batch: Batch, num_plays: int, *, count: int, seed: Sequence[int]) -> Iterator[Batch]:
    """Yield the minibatches of one or several passes over the batch. A single pass keeps the order of the plays; each
    of several passes is shuffled anew by the seed.

    Args:
        batch: Rows of all rollouts of a step.
        num_plays: Plays of a minibatch, as in `minibatches`.
        count: Number of passes.
        seed: Seed of the orders.
    """
    if count == 1:
        return minibatches(batch, num_plays)
    return shuffled_minibatches(batch, num_plays, passes=count, seed=seed)


def shuffled_minibatches(batch: Batch, num_plays: int, *, passes: int, seed: Sequence[int]) -> Iterator[Batch]:
    """Yield the minibatches of several passes over the batch, each in its own order, which depends on the seed."""
    rows = rows_by_play(batch)
    for number in range(passes):
        order = np.random.default_rng((*seed, number)).permutation(len(rows))
        yield from minibatches(batch.select(rows.select(order).values), num_plays)


@dataclass(frozen=True, eq=False)
class NoImages:
    """A `rl_core.data.batch.RowStore` of rows without images, made by the process that reads it.

    Args:
        num_rows: Number of rows.
    """

    num_rows: int

    def fetch(self) -> Batch:
        """Make the column."""
        return Batch({IMAGES: image_column([()] * self.num_rows)})


def with_images(batches: Sequence[Batch]) -> list[Batch]:
    """Add `images` to all batches if one has it, with empty rows in the others.

    Args:
        batches: Columns of groups of rollouts, with `tokens`.
    """
    if not any(IMAGES in batch for batch in batches):
        return list(batches)
    return [
        batch
        if IMAGES in batch
        else batch.with_columns(RemoteRows.of(NoImages(len(batch)), batch.lengths).columns([IMAGES]))
        for batch in batches
    ]


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
    """Add `routed_experts` to all batches if one has it, marked as unknown if it was not reported.

    Args:
        batches: Columns of groups of rollouts, with `tokens`.
    """
    known = next((batch for batch in batches if ROUTED_EXPERTS in batch), None)
    if known is None or all(ROUTED_EXPERTS in batch for batch in batches):
        return list(batches)
    # This fetches the column of one group, only if another group failed as a whole.
    shape = known.ragged(ROUTED_EXPERTS).values.shape[1:]

    def filled(batch: Batch) -> Batch:
        rows = RemoteRows.of(UnknownRouting(batch.lengths, shape), batch.lengths)
        return batch.with_columns(rows.columns([ROUTED_EXPERTS]))

    return [batch if ROUTED_EXPERTS in batch else filled(batch) for batch in batches]
