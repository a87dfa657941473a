"""What the shards of a shuffle are made of must be what selecting from the whole batch gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batch import Batch, RemoteRows
from rl_core.data.ragged import Ragged
from rl_core.data.shuffle import pick, plan_shuffle


class Store:
    def __init__(self, columns: Batch) -> None:
        self.columns = columns
        self.num_fetches = 0

    def fetch(self) -> Batch:
        self.num_fetches += 1
        return self.columns


def whole_batch(num_rows: int) -> Batch:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, num_rows)
    tokens = Ragged.from_rows([random.integers(0, 99, length) for length in lengths], np.int32)
    return Batch(
        {
            "tokens": tokens,
            "loss_mask": tokens.like(random.integers(1, 3, len(tokens.values)).astype(np.uint8)),
            "logprobs": tokens.like(random.random(len(tokens.values), dtype=np.float32)),
            "experts": tokens.like(random.integers(0, 9, (len(tokens.values), 2, 3)).astype(np.int16)),
            "scores": random.random(num_rows, dtype=np.float32),
            "advantages": random.random(num_rows),
        }
    )


def spread(whole: Batch, names: list[str], sizes: list[int]) -> tuple[dict, list[Store]]:
    """Columns of a batch in stores of so many rows each."""
    parts = whole.only(names).split(sizes)
    stores = [Store(part) for part in parts]
    remote = [
        Batch(RemoteRows.of(store, lengths).columns(names))
        for store, lengths in zip(stores, np.split(whole.lengths, np.cumsum(sizes)[:-1]), strict=True)
    ]
    return dict(Batch.concat(remote).columns), stores


def shards_of(batch: Batch, rows: list[np.ndarray], max_pickers: int) -> list[Batch]:
    plan = plan_shuffle(batch, rows, max_pickers)
    picked = [
        pick(picks, [store.fetch() for store in stores]) for picks, stores in zip(plan.picks, plan.stores, strict=True)
    ]
    return [shard.assemble([chunks[index] for chunks in picked]) for index, shard in enumerate(plan.shards)]


def assert_same(found: Batch, expected: Batch) -> None:
    assert set(found) == set(expected)
    for name in expected:
        near, far = expected[name], found[name]
        if isinstance(near, Ragged):
            assert isinstance(far, Ragged)
            assert far.equals(near), name
        else:
            assert isinstance(far, np.ndarray)
            assert far.dtype == near.dtype, name
            assert far.tolist() == near.tolist(), name


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_shard_is_what_selecting_its_rows_gives(num_rows, num_shards, max_pickers, random) -> None:
    whole = whole_batch(num_rows)
    cuts = sorted(random.randrange(num_rows + 1) for _ in range(random.randrange(6)))
    sizes = np.diff([0, *cuts, num_rows]).tolist()
    far, stores = spread(whole, ["tokens", "loss_mask", "experts"], sizes)
    also, _ = spread(whole, ["logprobs", "scores"], [num_rows])
    batch = Batch({**whole.columns, **far, **also})
    order = random.sample(range(num_rows), num_rows)
    shard_of = [random.randrange(num_shards) for _ in order]
    zeroed = np.array([random.random() < 0.3 for _ in order])
    batch, whole = (each.with_zeros("loss_mask", zeroed).select(order) for each in (batch, whole))
    rows = [
        np.array([row for row in range(num_rows) if shard_of[row] == shard], np.int64) for shard in range(num_shards)
    ]
    for shard, index in zip(shards_of(batch, rows, max_pickers), rows, strict=True):
        assert_same(shard, whole.select(index))
    assert all(store.num_fetches <= 1 for store in stores)


def test_local_columns_need_no_picker() -> None:
    whole = whole_batch(5)
    plan = plan_shuffle(whole, [np.array([3, 1]), np.array([0])], 4)
    assert plan.picks == ()
    assert_same(plan.shards[0].assemble([]), whole.select([3, 1]))


@pytest.mark.parametrize("num_pickers", [1, 2, 3])
def test_pickers_share_the_stores(num_pickers) -> None:
    far, stores = spread(whole_batch(6), ["tokens"], [1] * 6)
    plan = plan_shuffle(Batch(far), [np.arange(6)], num_pickers)
    assert [len(each) for each in plan.stores] == [6 // num_pickers] * num_pickers
    assert [store for each in plan.stores for store in each] == stores
