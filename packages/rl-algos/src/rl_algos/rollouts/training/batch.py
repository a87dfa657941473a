"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.losses.mask import DEMONSTRATION
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
from rl_core.data.batch import TOKENS, Batch, Column, RemoteColumn, RemoteRows, image_column
from rl_core.data.microbatch import PAIR, PREFIX
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.images import IMAGES
from rl_core.rollouts.group import LOSS_MASK, RECORD, ROUTED_EXPERTS, RolloutGroup
from rl_core.rollouts.rollout import unknown_routing
from rl_core.token_filter import ALLOWED

Advantages = np.ndarray | Ragged
"""float64, `[rollouts]` or token-aligned `[tokens]`."""


def build_batch(groups: Sequence[RolloutGroup], config: RolloutConfig) -> Batch:
    """Build a batch with one row per rollout, or per segment if the config splits rollouts, with the column `rollout`.
    It has `tokens`, `loss_mask` and `generation_logprobs` by token, and `prefix`, the number of each row's group. If
    plays have several rollouts, it has `play`, and if steps learn demonstrations, `demonstration`.

    If rollouts have images, there is the column `images`, empty in rows without any; if grammars may constrain turns,
    the column `allowed_tokens`.

    Rollouts that train nothing (failed; cut off, with overlong filtering) have an empty loss mask. The token-aligned
    columns stay where they are.

    Raises:
        ConfigError: If rollouts have several segments, and the config does not allow it.
    """
    constrained = [ALLOWED] if config.structured_output == "constrain" else []
    parts = with_empty_rows(with_routing([group.columns for group in groups]), constrained)
    shared = set.intersection(*(set(part) for part in parts)) - {RECORD}
    names = [name for name in parts[0] if name in shared]
    batch = Batch.concat([part.only(names) for part in parts])
    batch = batch.with_columns({PREFIX: np.repeat(np.arange(len(parts)), [len(part) for part in parts])})
    if config.splits:
        batch = batch.with_columns({ROLLOUT: rollout_numbers(groups)})
    elif any(group.rollouts.segments for group in groups):
        raise ConfigError(
            f"{config.section}.rewritten_history: the program {config.rollout_program} returned rollouts of several "
            "segments; set this key to `split`, so that these count as one rollout"
        )
    if any(group.rollouts.play for group in groups):
        batch = batch.with_columns({PLAY: play_numbers(groups)})
    if config.marks_demonstrations:
        marks = [mark for group in groups for mark in group.rollouts.is_demonstration or (False,) * len(group.rollouts)]
        batch = batch.with_columns({DEMONSTRATION: to_rows(batch, np.array(marks, dtype=np.uint8))})
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


def passes(
    batch: Batch, num_plays: int, *, count: int, seed: Sequence[int], demonstrations: Batch | None = None
) -> Iterator[Batch]:
    """Yield the minibatches of one or several passes over the batch. A single pass keeps the order of the plays; each
    of several passes is shuffled anew by the seed.

    Args:
        batch: Rows of all rollouts of a step.
        num_plays: Plays of a minibatch, as in `minibatches`.
        count: Number of passes.
        seed: Seed of the orders.
        demonstrations: Rows that are spread over the minibatches of each pass, in addition to the rollouts; None for
            none.
    """
    if count == 1:
        return with_demonstrations(minibatches(batch, num_plays), demonstrations, count_minibatches(batch, num_plays))
    return shuffled_minibatches(batch, num_plays, passes=count, seed=seed, demonstrations=demonstrations)


def count_minibatches(batch: Batch, num_plays: int) -> int:
    """Return the number of `minibatches` of a batch."""
    return -(-len(rows_by_play(batch)) // num_plays)


def with_demonstrations(parts: Iterator[Batch], demonstrations: Batch | None, num_parts: int) -> Iterator[Batch]:
    """Yield minibatches with the rows of demonstrations spread evenly over them, each row in one of them.

    Args:
        parts: Minibatches of rollouts, with all columns that the loss reads.
        demonstrations: Rows from `rl_algos.rollouts.training.demonstrations`; None for none.
        num_parts: Number of minibatches.
    """
    if demonstrations is None:
        yield from parts
        return
    places = np.array_split(np.arange(len(demonstrations)), num_parts)
    for part, own in zip(parts, places, strict=True):
        yield _joined(part, demonstrations.select(own)) if len(own) else part


def _joined(batch: Batch, rows: Batch) -> Batch:
    """Return the rollouts followed by demonstrations, each a sequence and a play of its own. Columns that only rollouts
    have, such as advantages and logprobs before the step, are 0 there."""
    filled: dict[str, Column] = {}
    for name, column in batch.columns.items():
        if name in rows:
            filled[name] = rows[name]
        elif name in (ROLLOUT, PLAY, PAIR, PREFIX):
            filled[name] = batch.array(name).max() + 1 + np.arange(len(rows))
        elif isinstance(column, np.ndarray):
            filled[name] = np.zeros(len(rows), column.dtype)
        elif name not in (IMAGES, ALLOWED, ROUTED_EXPERTS):
            # Columns of tokens that are stored elsewhere are logprobs.
            dtype = np.float32 if isinstance(column, RemoteColumn) else column.values.dtype
            shape = () if isinstance(column, RemoteColumn) else column.values.shape[1:]
            filled[name] = rows.ragged(TOKENS).like(np.zeros((int(rows.lengths.sum()), *shape), dtype))
    # Joining a column in this process with one stored elsewhere would bring the latter here.
    remote = {name: each for name, each in batch.columns.items() if isinstance(each, RemoteColumn) and name in filled}
    if remote:
        store = HeldRows(Batch({each.name: filled[name] for name, each in remote.items()}))
        stored = RemoteRows.of(store, rows.lengths)
        filled |= {name: RemoteColumn(stored, each.name) for name, each in remote.items()}
    if ROUTED_EXPERTS in batch:
        shape = batch.select([0]).ragged(ROUTED_EXPERTS).values.shape[1:]
        filled |= RemoteRows.of(UnknownRouting(rows.lengths, shape), rows.lengths).columns([ROUTED_EXPERTS])
    if IMAGES in rows:
        filled[IMAGES] = rows[IMAGES]
    return Batch.concat(with_empty_rows([batch, Batch(filled)]))


@dataclass(frozen=True, eq=False)
class HeldRows:
    """A `rl_core.data.batch.RowStore` of rows that are sent along, for columns that join others stored elsewhere.

    Args:
        rows: The rows.
    """

    rows: Batch

    def fetch(self) -> Batch:
        """Return the rows."""
        return self.rows


def shuffled_minibatches(
    batch: Batch, num_plays: int, *, passes: int, seed: Sequence[int], demonstrations: Batch | None = None
) -> Iterator[Batch]:
    """Yield the minibatches of several passes over the batch, each in its own order, which depends on the seed; see
    `passes`."""
    rows, num_parts = rows_by_play(batch), count_minibatches(batch, num_plays)
    for number in range(passes):
        order = np.random.default_rng((*seed, number)).permutation(len(rows))
        parts = minibatches(batch.select(rows.select(order).values), num_plays)
        yield from with_demonstrations(parts, demonstrations, num_parts)


@dataclass(frozen=True, eq=False)
class EmptyRows:
    """A `rl_core.data.batch.RowStore` of rows without images and allowed tokens, made by the process that reads it.

    Args:
        num_rows: Number of rows.
    """

    num_rows: int

    def fetch(self) -> Batch:
        """Make the columns."""
        none = [()] * self.num_rows
        return Batch({IMAGES: image_column(none), ALLOWED: Ragged.from_rows(none, np.uint8)})


def with_empty_rows(batches: Sequence[Batch], needed: Sequence[str] = ()) -> list[Batch]:
    """Add `images` and the allowed tokens to all batches if one has them, with empty rows in the others.

    Args:
        batches: Columns of groups of rollouts, with `tokens`.
        needed: Columns to add if no batch has them.
    """
    names = [name for name in (IMAGES, ALLOWED) if name in needed or any(name in batch for batch in batches)]

    def filled(batch: Batch) -> Batch:
        missing = [name for name in names if name not in batch]
        return batch.with_columns(RemoteRows.of(EmptyRows(len(batch)), batch.lengths).columns(missing))

    return [batch if all(name in batch for name in names) else filled(batch) for batch in batches]


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
