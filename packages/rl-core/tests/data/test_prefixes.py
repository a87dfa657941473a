"""Prefixes that rows share, and microbatches in which they count once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR, PREFIX, Batching, shard, shard_ids
from rl_core.data.prefixes import MIN_SAVED, SharedPrefixes
from rl_core.data.ragged import Ragged

rows_of_few_tokens = st.lists(st.lists(st.integers(-1, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def batch_of(rows, **columns):
    tokens = Ragged.from_rows(rows, np.int32)
    return Batch({"tokens": tokens, **{name: tokens.like(np.concatenate(column)) for name, column in columns.items()}})


def num_prefixes(rows):
    """Number of different beginnings of rows: the tokens of a tree of all of them."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


@given(rows_of_few_tokens)
def test_rows_in_order_add_each_different_beginning_once(rows):
    tokens = Ragged.from_rows(rows, np.int32)
    found = SharedPrefixes.of(tokens.offsets, [tokens.values])
    assert sorted(found.order.tolist()) == list(range(len(rows)))
    for place, (row, shared) in enumerate(zip(found.order, found.shared, strict=True)):
        before = rows[found.order[place - 1]]
        assert rows[row][:shared] == before[:shared]
        assert place or not shared
    # A single shared token is at least a tenth of such rows.
    assert len(tokens.values) - found.shared.sum() == num_prefixes(rows)


def test_a_small_part_of_a_row_is_not_shared():
    rows = [[0, *range(1, 20)], [0, *range(30, 49)], [0, *range(60, 69)]]
    tokens = Ragged.from_rows(rows, np.int32)
    assert MIN_SAVED == 0.1
    assert SharedPrefixes.of(tokens.offsets, [tokens.values]).shared.tolist() == [0, 0, 1]


def test_shared_tokens_agree_in_all_columns():
    tokens = Ragged.from_rows([[1, 2, 3], [1, 2, 3], [1, 2, 3]], np.int32)
    experts = np.zeros((9, 2, 4), np.int16)
    experts[4, 1, 3] = 1  # of the second token of the second row
    assert SharedPrefixes.of(tokens.offsets, [tokens.values, experts]).shared.tolist() == [0, 1, 1]


@given(rows_of_few_tokens, st.integers(4, 30), st.integers(0, 6), st.booleans())
def test_microbatches_hold_every_row_once_and_their_different_tokens_fit(rows, max_tokens, min_count, even):
    batch = batch_of(rows)
    batching = Batching(packed=True, max_tokens=max_tokens, max_rows=None, shares_prefixes=True)
    units = batching.units(batch)
    plan = batching.plan(batch, min_count, even=even, units=units)
    assert len(plan) >= min_count
    assert sorted(row for part in plan for row in part.tolist()) == list(range(len(rows)))
    if units is not None:
        assert sum(unit.tokens for unit in units) >= num_prefixes(rows)
    for part in plan:
        own = [rows[row] for row in part]
        assert num_prefixes(own) <= max_tokens or len(own) == 1 or num_prefixes(own) <= max(map(len, own))


def test_a_group_is_one_microbatch_in_which_its_prompt_counts_once():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, 512).tolist() for _ in range(3)]
    rows = [prompts[row % 3] + rng.integers(0, 9, 64).tolist() for row in range(24)]
    batch = batch_of(rows)
    batching = Batching(packed=True, max_tokens=512 + 8 * 64, max_rows=None, shares_prefixes=True)
    plan = batching.plan(batch, units=batching.units(batch))
    assert sorted(sorted(row % 3 for row in part.tolist()) for part in plan) == [[0] * 8, [1] * 8, [2] * 8]
    small = Batching(packed=True, max_tokens=512 + 4 * 64, max_rows=None, shares_prefixes=True)
    assert [len(part) for part in small.plan(batch, units=small.units(batch))] == [4] * 6


@pytest.mark.parametrize("rows", [[[1, 2, 3], [4, 5], [6]], [[0, *range(20)], [0, *range(30, 50)]]])
def test_rows_that_share_little_are_planned_as_without_sharing(rows):
    batch, plain = batch_of(rows), Batching(packed=True, max_tokens=24, max_rows=None)
    sharing = Batching(packed=True, max_tokens=24, max_rows=None, shares_prefixes=True)
    assert sharing.units(batch) is None
    plans = (batching.plan(batch, units=batching.units(batch)) for batching in (plain, sharing))
    assert [[part.tolist() for part in plan] for plan in plans] == [[part.tolist() for part in plain.plan(batch)]] * 2


def test_rows_that_must_stay_together_are_planned_by_their_ids():
    batch = batch_of([[1, 2, 3], [1, 2, 4]]).with_columns({PAIR: np.array([0, 0])})
    assert Batching(packed=True, max_tokens=8, max_rows=None, shares_prefixes=True).units(batch) is None


def test_groups_stay_in_one_shard_unless_they_are_larger_than_its_share():
    ids = np.arange(32) % 4
    batch = batch_of([[0] * 10] * 32).with_columns({PREFIX: ids})
    assert shard_ids(batch) is None
    for num_shards, per_group in ((2, 1), (4, 1), (8, 2), (32, 8)):
        parts = shard_ids(batch, num_shards, by_prefix=True)
        assert [len(set(parts[ids == group])) for group in range(4)] == [per_group] * 4
        tokens = [10 * len(rows) for rows in shard(batch.lengths, num_shards, parts)]
        assert tokens == [320 // num_shards] * num_shards
