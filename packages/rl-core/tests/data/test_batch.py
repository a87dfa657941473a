from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batch import Batch, Local, RemoteColumn, RemoteRows
from rl_core.data.ragged import Ragged


class FakeStore:
    """Columns that lie elsewhere; counts how often they are brought here."""

    def __init__(self, **columns: Local) -> None:
        self._batch = Batch(columns)
        self.num_fetches = 0

    def fetch(self) -> Batch:
        self.num_fetches += 1
        return self._batch

    def rows(self, lengths: Sequence[int] | None = None) -> RemoteRows:
        return RemoteRows.of(self, np.zeros(len(self._batch)) if lengths is None else lengths)


def tokens(start: int, num_rows: int) -> Ragged:
    return Ragged.from_rows([np.arange(start + i, start + 2 * i) for i in range(num_rows)], np.int32)


def batch(num_rows: int, start: int = 0) -> Batch:
    """Two columns, each local and remote."""
    reward = np.arange(start, start + num_rows, dtype=np.float64)
    store = FakeStore(far_tokens=tokens(start, num_rows), far_reward=reward)
    remote = store.rows().columns(["far_tokens", "far_reward"])
    return Batch({"tokens": tokens(start, num_rows), "reward": reward, **remote})


def plain(part: Batch) -> dict[str, Any]:
    columns = {name: part[name] for name in part}
    return {n: [r.tolist() for r in c] if isinstance(c, Ragged) else c.tolist() for n, c in columns.items()}


def same_near_and_far(part: Batch) -> bool:
    columns = plain(part)
    return columns["tokens"] == columns["far_tokens"] and columns["reward"] == columns["far_reward"]


operations = st.lists(
    st.tuples(st.sampled_from(["select", "split", "concat"]), st.randoms(use_true_random=False)), max_size=6
)


@given(st.integers(0, 6), operations)
def test_remote_columns_follow_local_ones_through_everything(num_rows: int, steps: list[tuple[str, Any]]) -> None:
    current, model = batch(num_rows), list(range(num_rows))
    for operation, random in steps:
        if operation == "select" and model:
            rows = [random.randrange(-len(model), len(model)) for _ in range(random.randrange(8))]
            current, model = current.select(rows), [model[i] for i in rows]
        elif operation == "split":
            cut = random.randint(0, len(model))
            first, second = current.split([cut, len(model) - cut])
            current, model = Batch.concat([second, first]), model[cut:] + model[:cut]
        elif operation == "concat":
            current, model = Batch.concat([current, batch(2, start=9)]), [*model, 9, 10]
        assert len(current) == len(model)
    assert same_near_and_far(current)
    assert current.array("reward").tolist() == model


def test_selecting_and_joining_move_no_data_and_each_store_is_fetched_once() -> None:
    store = FakeStore(tokens=tokens(0, 5))
    column = Batch(store.rows().columns(["tokens"]))
    parts = column.split([2, 3])
    joined = Batch.concat([parts[1], parts[0].select([1, 0, 1])])
    assert store.num_fetches == 0
    assert [row.tolist() for row in joined.ragged("tokens")] == [[2, 3], [3, 4, 5], [4, 5, 6, 7], [1], [], [1]]
    assert store.num_fetches == 1


def test_stores_that_are_not_read_are_not_fetched() -> None:
    near, far = FakeStore(x=np.arange(3)), FakeStore(x=np.arange(3, 6))
    joined = Batch.concat([Batch(store.rows().columns(["x"])) for store in (near, far)])
    assert joined.select([1, 0])["x"].tolist() == [1, 0]
    assert (near.num_fetches, far.num_fetches) == (1, 0)
    with pytest.raises(ValueError, match="lacks"):
        joined.require("y")
    assert far.num_fetches == 0


def test_columns_that_share_their_rows_share_them_after_every_operation() -> None:
    joined = Batch.concat([batch(3).select([2, 0]), batch(2)]).split([1, 3])[1]
    far_tokens, far_reward = (joined.columns[name] for name in ("far_tokens", "far_reward"))
    assert isinstance(far_tokens, RemoteColumn)
    assert isinstance(far_reward, RemoteColumn)
    assert far_tokens.rows is far_reward.rows


def test_the_lengths_of_tokens_are_known_without_fetching_them() -> None:
    store = FakeStore(tokens=tokens(0, 4))
    far = Batch(store.rows(tokens(0, 4).lengths.tolist()).columns(["tokens"]))
    assert Batch.concat([far, far]).select([7, 2]).lengths.tolist() == [3, 2]
    assert store.num_fetches == 0
    assert Batch({"tokens": tokens(0, 4)}).lengths.tolist() == [0, 1, 2, 3]


def test_rows_that_were_split_over_stores_come_back_in_order() -> None:
    shards = [np.array([1, 4]), np.array([], np.int64), np.array([0, 2, 3])]
    stores = [FakeStore(x=index.astype(np.float32)) for index in shards]
    rows = RemoteRows.split_over(stores, shards, np.ones(5, np.int64))
    assert Batch(rows.columns(["x"])).array("x").tolist() == [0, 1, 2, 3, 4]
    assert [store.num_fetches for store in stores] == [1, 0, 1]


def test_zeros_of_chosen_rows_go_with_them_and_move_no_data() -> None:
    before = batch(4, start=1)
    chosen = np.array([False, True, False, True])
    after = before
    for name in before:
        after = after.with_zeros(name, chosen)
    mixed = Batch.concat([after.select([3, 2, 1]), before.select([1])])
    assert same_near_and_far(mixed)
    assert mixed.array("reward").tolist() == [0, 3, 0, 2]
    assert [row.tolist() for row in mixed.ragged("tokens")] == [[0, 0, 0], [3, 4], [0], [2]]
    assert mixed.ragged("far_tokens").values.dtype == np.int32
    assert before.array("reward").tolist() == [1, 2, 3, 4]


def test_no_rows_keep_the_type_of_the_column() -> None:
    none = batch(3).select([]).local()
    assert len(none) == 0
    assert none.ragged("far_tokens").values.dtype == np.int32
    assert none.array("far_reward").dtype == np.float64
    assert len(Batch.concat([none, batch(2)])) == 2


def test_local_brings_every_column_here() -> None:
    local = batch(3).select([2, 0]).local()
    assert not any(isinstance(column, RemoteColumn) for column in local.columns.values())
    assert same_near_and_far(pickle.loads(pickle.dumps(local)))


def test_local_fetches_a_store_once_for_all_columns_of_its_rows() -> None:
    near, far = FakeStore(a=tokens(0, 3), b=np.arange(3)), FakeStore(a=tokens(3, 2), b=np.arange(2))
    rows = RemoteRows.concat([near.rows(), far.rows()]).select([4, 0])
    local = Batch({**rows.columns(["a", "b"]), "c": np.arange(2)}).with_zeros("b", np.array([True, False])).local()
    assert plain(local) == {"a": [tokens(3, 2)[1].tolist(), tokens(0, 3)[0].tolist()], "b": [0, 0], "c": [0, 1]}
    assert (near.num_fetches, far.num_fetches) == (1, 1)


def test_rows_of_all_columns_must_agree() -> None:
    with pytest.raises(ValueError, match="'b': 3"):
        Batch({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="'c': 1"):
        batch(2).with_columns({"c": np.zeros(1)})
    with pytest.raises(ValueError, match="at least one"):
        Batch({})
    with pytest.raises(TypeError, match="list"):
        Batch({"a": [1, 2]})  # type: ignore[dict-item]


def test_wrong_uses_are_named() -> None:
    with pytest.raises(ValueError, match=r"lacks columns \['x', 'y'\]"):
        batch(1).require("x", "tokens", "y")
    with pytest.raises(TypeError, match="not a Ragged"):
        batch(1).ragged("reward")
    with pytest.raises(TypeError, match="not an array"):
        batch(1).array("tokens")
    with pytest.raises(ValueError, match="add up"):
        batch(3).split([1, 1])
    with pytest.raises(ValueError, match="same columns"):
        Batch.concat([batch(1), batch(1).only(["tokens"])])
    with pytest.raises(ValueError, match="no batches"):
        Batch.concat([])
    with pytest.raises(TypeError, match="flatnonzero"):
        batch(2).select([True, False])


def test_columns_are_added_and_replaced_without_changing_the_batch() -> None:
    before = batch(2)
    after = before.with_columns({"reward": np.array([7.0, 8.0]), "new": np.array([1, 2])})
    assert after.array("reward").tolist() == [7.0, 8.0]
    assert before.array("reward").tolist() == [0.0, 1.0]
    assert "new" not in before
    assert list(after.only(["new"])) == ["new"]
