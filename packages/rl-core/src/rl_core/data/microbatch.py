"""Assign rows to data-parallel ranks and to microbatches, as many as a pipeline needs; all by row lengths."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.prefixes import SharedPrefixes
from rl_core.model_config import ModelConfig

PAIR = "pair"
"""The column whose equal ids keep rows in one shard and one microbatch."""

PREFIX_GROUP = "prefix_group"
"""The column of a forward-only pass whose equal ids keep rows in one shard, in microbatches without rows of other ids.
The results of such rows do not depend on the rest of the batch, and a backend may compute the tokens that all rows of a
microbatch begin with once."""

PREFIX = "prefix"
"""Column of ids that rows have in common if they may share a prefix, such as the rollouts of a prompt. A model that
computes shared prefixes once keeps such rows in one shard, as far as shards stay balanced."""

BUBBLE = 0.2
"""Share of a pass for which a pipeline rank may wait, if there are rows for more microbatches."""

MIN_TOKENS = 512
"""Number of tokens below which microbatches are not made smaller: matrix products would become the slower part."""


def shard_ids(batch: Batch, num_shards: int = 1, *, by_prefix: bool = False) -> np.ndarray | None:
    """Return the ids of rows that stay in one shard, `[rows]`; None if any row may be in any shard.

    Args:
        batch: The rows.
        num_shards: Number of data-parallel ranks.
        by_prefix: True to keep rows of equal `PREFIX` ids together, in parts of at most the tokens of a shard if all
            have the same number, so that few groups are spread over many ranks.
    """
    name = next((name for name in (PAIR, PREFIX_GROUP) if name in batch), None)
    if name is not None:
        return batch.array(name)
    if not by_prefix or PREFIX not in batch:
        return None
    ids, lengths = batch.array(PREFIX), batch.lengths
    share = max(1, int(lengths.sum()) // num_shards)
    parts, part, tokens, last = np.zeros(len(ids), dtype=np.int64), -1, 0, None
    for row in np.argsort(ids, kind="stable").tolist():
        if ids[row] != last or tokens + lengths[row] > share:
            part, tokens, last = part + 1, 0, ids[row]
        parts[row] = part
        tokens += int(lengths[row])
    return parts


class RowUnit(NamedTuple):
    """Rows that stay in one microbatch.

    Args:
        rows: The rows.
        tokens: Number of tokens that are computed for them.
        longest: Number of tokens of the longest row.
    """

    rows: tuple[int, ...]
    tokens: int
    longest: int


def shard(lengths: ArrayLike, num_shards: int, groups: ArrayLike | None = None) -> list[np.ndarray]:
    """Split rows over data-parallel ranks, balanced by tokens and then by rows.

    The longest unit goes first, each to the lightest shard, so no two shards differ by more tokens than the longest
    unit has.

    Args:
        lengths: `[rows]`, tokens of each row.
        num_shards: Number of ranks.
        groups: `[rows]`, ids; rows with the same id form one unit and stay together. A row is its own unit
            without it.

    Returns:
        int64 row indices of each shard, rising; a shard may be empty.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    sizes, ids = _sizes_and_ids(lengths, groups)
    # `unit_of` is the unit of each row, and `first` the first row of each unit.
    unit_of = first = np.arange(len(sizes))
    if ids is not None:
        _, first, unit_of = np.unique(ids, return_index=True, return_inverse=True)
    tokens, num_rows = np.zeros_like(first), np.bincount(unit_of, minlength=len(first))
    np.add.at(tokens, unit_of, sizes)
    order = np.lexsort((first, -tokens))
    loads = [(0, 0, index) for index in range(num_shards)]  # a heap of tokens, rows and shard
    chosen = []
    for more_tokens, more_rows in zip(tokens[order].tolist(), num_rows[order].tolist(), strict=True):
        load_tokens, load_rows, lightest = loads[0]
        chosen.append(lightest)
        heapq.heapreplace(loads, (load_tokens + more_tokens, load_rows + more_rows, lightest))
    shard_of_unit = np.zeros_like(first)
    shard_of_unit[order] = chosen
    shard_of = shard_of_unit[unit_of]
    ends = np.cumsum(np.bincount(shard_of, minlength=num_shards))
    return np.split(np.argsort(shard_of, kind="stable"), ends[:-1])


def plan_microbatches(
    lengths: ArrayLike,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    padded: bool = False,
    min_count: int = 0,
    even: bool = False,
    groups: ArrayLike | None = None,
) -> list[np.ndarray]:
    """Split one rank's rows into microbatches.

    Packing: `max_tokens` bounds the sum of the lengths (best fit, longest first). Dynamic batching: with `padded`,
    `max_tokens` bounds the number of rows times the longest of them, rows of like length together. Plain: `max_rows`
    consecutive rows. A unit (a row, or a group) larger than the budget gets its own microbatch.

    Args:
        lengths: `[rows]`, tokens of each row.
        max_tokens: Token budget; exactly one of `max_tokens` and `max_rows` must be given.
        max_rows: Row budget.
        padded: True if padding counts towards `max_tokens`.
        min_count: Return at least this many; microbatches of several units are split, then empty ones follow.
        even: True to pack about the same number of tokens into each of `min_count` microbatches, if they hold all
            rows; otherwise the first ones are filled.
        groups: `[rows]`, ids; rows with the same id stay in one microbatch.

    Returns:
        int64 row indices of each microbatch, rising.
    """
    if (max_tokens is None) == (max_rows is None):
        raise ValueError(f"give one of max_tokens and max_rows, got {max_tokens} and {max_rows}")
    units = _units(*_sizes_and_ids(lengths, groups))
    if max_rows is not None:
        plan = _consecutive(units, max_rows)
    elif max_tokens is not None and padded:
        plan = _alike(units, max_tokens)
    else:
        return _packed(units, max_tokens or 0, min_count, even=even)
    return _rows_of(_at_least(plan, min_count))


@dataclass(frozen=True)
class Batching:
    """How a model's rows become microbatches.

    Args:
        packed: Rows lie end to end; otherwise they are padded.
        max_tokens: Token budget of a microbatch, padding included; None if rows are counted.
        max_rows: Row budget, if there is no token budget.
        row_multiple: Each packed row fills a multiple of this number, if microbatches are padded to `max_tokens`; None
            if they are not.
        shares_prefixes: True if the model computes tokens that rows of a microbatch begin with once, so that they
            count once towards `max_tokens`.
    """

    packed: bool
    max_tokens: int | None
    max_rows: int | None
    row_multiple: int | None = None
    shares_prefixes: bool = False

    @classmethod
    def of(cls, config: ModelConfig, *, training: bool, row_multiple: int | None = None) -> Batching:
        """Return the batching that a model's config asks for, in training or in forward-only passes.

        Args:
            config: The model.
            training: True for training.
            row_multiple: Argument of the same name of the class.

        Raises:
            ValueError: If both packing and dynamic batching are enabled.
        """
        rows = config.train_micro_batch_size if training else config.logprob_batch_size
        packing, dynamic = config.sequence_packing, config.dynamic_batching
        if packing.enabled and dynamic.enabled:
            raise ValueError("sequence_packing and dynamic_batching are both enabled; disable one of them")
        if not (packing.enabled or dynamic.enabled):
            return cls(packed=False, max_tokens=None, max_rows=rows)
        chosen = packing if packing.enabled else dynamic
        tokens = chosen.train_mb_tokens if training else chosen.logprob_mb_tokens
        return cls(
            packed=packing.enabled,
            max_tokens=tokens or rows * config.max_total_sequence_length,
            max_rows=None,
            row_multiple=row_multiple if packing.enabled else None,
        )

    @property
    def is_fixed(self) -> bool:
        """Return whether microbatches are padded to one length, so that fewer of them are less work."""
        return self.row_multiple is not None

    def units(self, batch: Batch, inputs: Iterable[str] = ()) -> Sequence[RowUnit] | None:
        """Return the runs of rows that microbatches hold whole because they share prefixes; None if rows are planned
        by their lengths, because they share too little or have ids.

        Args:
            batch: Local rows.
            inputs: Columns that hidden states follow from, in addition to the tokens.
        """
        if not self.shares_prefixes or self.max_tokens is None or PREFIX_GROUP in batch or PAIR in batch:
            return None
        tokens = batch.ragged(TOKENS)
        columns = [tokens.values, *(batch.ragged(name).values for name in inputs)]
        found = SharedPrefixes.of(tokens.offsets, columns)
        if not found.shared.any():
            return None
        cut = found.runs(tokens.lengths, self.max_tokens)
        return [RowUnit(tuple(rows), count, int(tokens.lengths[rows].max())) for rows, count in cut]

    def num_units(self, batch: Batch, units: Sequence[RowUnit] | None = None) -> int:
        """Return the number of rows, or groups of rows, that microbatches hold whole; 0 if microbatches may not be
        split further.

        Args:
            batch: The rows.
            units: Result of `units`.
        """
        if units is not None:
            return len(units)
        if PREFIX_GROUP in batch:
            return 0
        return len(np.unique(batch.array(PAIR))) if PAIR in batch else len(batch)

    def plan(
        self, batch: Batch, min_count: int = 0, *, even: bool = False, units: Sequence[RowUnit] | None = None
    ) -> list[np.ndarray]:
        """Return row indices of each microbatch, as `plan_microbatches`; rows with the same `pair` id stay together,
        and rows with another `prefix_group` id apart.

        Args:
            batch: The rows.
            min_count: As in `plan_microbatches`.
            even: As in `plan_microbatches`.
            units: Result of `units`.
        """
        if units is not None:
            assert self.max_tokens is not None
            return _packed(units, self.max_tokens, min_count, even=even)
        multiple = self.row_multiple or 1
        lengths = -(-batch.ragged(TOKENS).lengths // multiple) * multiple
        if PREFIX_GROUP in batch:
            return self._plan_groups(lengths, batch.array(PREFIX_GROUP), min_count)
        return plan_microbatches(
            lengths,
            max_tokens=self.max_tokens,
            max_rows=self.max_rows,
            padded=not self.packed,
            min_count=min_count,
            even=even,
            groups=batch.array(PAIR) if PAIR in batch else None,
        )

    def _plan_groups(self, lengths: np.ndarray, ids: np.ndarray, min_count: int) -> list[np.ndarray]:
        """Return the microbatches of each group of rows, which follow from its own rows only.

        Those with most tokens come first, so that ranks that wait for one another have similar work at a time.
        """
        order = np.argsort(ids, kind="stable")
        plan = []
        for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1) if len(order) else []:
            own = plan_microbatches(
                lengths[rows], max_tokens=self.max_tokens, max_rows=self.max_rows, padded=not self.packed
            )
            plan += [rows[part] for part in own]
        plan.sort(key=lambda rows: -int(lengths[rows].sum()))
        return plan + [np.zeros(0, dtype=np.int64)] * (min_count - len(plan))


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that microbatches pass.

    Args:
        size: Number of pipeline ranks; 1 without a pipeline.
        num_chunks: Number of virtual stages of each rank, interleaved with the stages of the others.
    """

    size: int = 1
    num_chunks: int = 1

    @property
    def multiple(self) -> int:
        """The number of microbatches of a pass must be a multiple of this: interleaved stages pass them on in rounds of
        as many as there are ranks."""
        return self.size if self.num_chunks > 1 else 1

    def bubble(self, num_microbatches: int) -> float:
        """Return the share of a pass for which a rank waits while the pipeline fills and drains.

        All microbatches and stages are taken to need the same time.

        See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
        """
        waits = self.size - 1
        return waits / (self.num_chunks * num_microbatches + waits) if waits else 0.0

    def wanted(self, num_units: int, num_tokens: int) -> int:
        """Return the number of microbatches that keeps the bubble to `BUBBLE`; 1 without a pipeline.

        There are no more than this rank's rows are worth splitting into.

        Args:
            num_units: Number of units that cannot be split: rows, or groups of them.
            num_tokens: Number of tokens of all rows.
        """
        if self.size == 1:
            return 1
        enough = -(-round((self.size - 1) * (1 - BUBBLE) / BUBBLE) // self.num_chunks)
        return max(1, min(enough, num_units, num_tokens // MIN_TOKENS))

    def rounded(self, num_microbatches: int) -> int:
        """Return a number of microbatches that can pass, at least as large as the given one."""
        return -(-num_microbatches // self.multiple) * self.multiple


def _packed(units: Sequence[RowUnit], max_tokens: int, min_count: int, *, even: bool) -> list[np.ndarray]:
    """Return the rows of each microbatch of packed units; see `plan_microbatches`."""
    plan = (_evenly(units, max_tokens, min_count) if even else None) or _best_fit(units, max_tokens)
    return _rows_of(_at_least(plan, min_count))


def _rows_of(plan: Sequence[Sequence[RowUnit]]) -> list[np.ndarray]:
    return [np.sort(np.asarray([row for unit in bin_ for row in unit.rows], dtype=np.int64)) for bin_ in plan]


def _units(sizes: np.ndarray, groups: np.ndarray | None) -> list[RowUnit]:
    if groups is None:
        return [RowUnit((row,), int(size), int(size)) for row, size in enumerate(sizes)]
    members: dict[object, list[int]] = {}
    for row, id_ in enumerate(groups.tolist()):
        members.setdefault(id_, []).append(row)
    return [RowUnit(tuple(rows), int(sizes[rows].sum()), int(sizes[rows].max())) for rows in members.values()]


def _sizes_and_ids(lengths: ArrayLike, groups: ArrayLike | None) -> tuple[np.ndarray, np.ndarray | None]:
    sizes = np.asarray(lengths, dtype=np.int64)
    ids = None if groups is None else np.asarray(groups)
    if ids is not None and ids.shape != sizes.shape:
        raise ValueError(f"groups must have one id per row: {ids.shape} ids for {sizes.shape} rows")
    return sizes, ids


def _by_tokens(units: Sequence[RowUnit]) -> list[RowUnit]:
    return sorted(units, key=lambda unit: (-unit.tokens, unit.rows[0]))


def _consecutive(units: Sequence[RowUnit], max_rows: int) -> list[list[RowUnit]]:
    plan: list[list[RowUnit]] = []
    rows = 0
    for unit in units:
        if not plan or rows + len(unit.rows) > max_rows:
            plan.append([])
            rows = 0
        plan[-1].append(unit)
        rows += len(unit.rows)
    return plan


def _alike(units: Sequence[RowUnit], max_tokens: int) -> list[list[RowUnit]]:
    plan: list[list[RowUnit]] = []
    rows = longest = 0
    for unit in sorted(units, key=lambda unit: (-unit.longest, unit.rows[0])):
        if not plan or (rows + len(unit.rows)) * longest > max_tokens:
            plan.append([])
            rows, longest = 0, unit.longest
        plan[-1].append(unit)
        rows += len(unit.rows)
    return plan


def _best_fit(units: Sequence[RowUnit], max_tokens: int) -> list[list[RowUnit]]:
    plan: list[list[RowUnit]] = []
    free: list[tuple[int, int]] = []  # room of each microbatch and its place in the plan, rising
    for unit in _by_tokens(units):
        fitting = bisect_left(free, (unit.tokens, 0))
        room, place = free.pop(fitting) if fitting < len(free) else (max_tokens, len(plan))
        if place == len(plan):
            plan.append([])
        plan[place].append(unit)
        insort(free, (room - unit.tokens, place))
    return plan


def _evenly(units: Sequence[RowUnit], max_tokens: int, count: int) -> list[list[RowUnit]] | None:
    """Assign the longest unit first, each to the microbatch of fewest tokens; None if one would exceed the budget."""
    plan: list[list[RowUnit]] = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]  # a heap of tokens and place in the plan
    for unit in _by_tokens(units) if count else ():
        tokens, place = loads[0]
        if plan[place] and tokens + unit.tokens > max_tokens:
            return None
        plan[place].append(unit)
        heapq.heapreplace(loads, (tokens + unit.tokens, place))
    return plan


def _at_least(plan: list[list[RowUnit]], min_count: int) -> list[list[RowUnit]]:
    """Halve the microbatch of most tokens until there are enough; the rest stay empty."""
    plan = list(plan)
    while len(plan) < min_count:
        largest = max(
            (index for index, units in enumerate(plan) if len(units) > 1),
            key=lambda index: (sum(unit.tokens for unit in plan[index]), -index),
            default=None,
        )
        if largest is None:
            plan.append([])
        else:
            ordered = _by_tokens(plan[largest])
            plan[largest : largest + 1] = [ordered[0::2], ordered[1::2]]
    return plan
