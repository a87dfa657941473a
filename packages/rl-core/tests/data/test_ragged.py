from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.ragged import Ragged

rows_of_ints = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=8)


def lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged]


@given(rows_of_ints)
def test_rows_come_back_as_they_were_joined(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows, np.int32)
    assert lists(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.values.dtype == np.int32
    assert lists(pickle.loads(pickle.dumps(ragged))) == rows


@given(rows_of_ints, st.data())
def test_select_is_indexing_by_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    places = st.lists(st.integers(-len(rows), len(rows) - 1)) if rows else st.just([])
    index = data.draw(places)
    assert lists(Ragged.from_rows(rows, np.int64).select(index)) == [rows[i] for i in index]


@given(st.lists(rows_of_ints, min_size=1, max_size=4))
def test_concat_is_concatenation_of_lists(parts: list[list[list[int]]]) -> None:
    joined = Ragged.concat([Ragged.from_rows(rows, np.int64) for rows in parts])
    assert lists(joined) == [row for rows in parts for row in rows]


@given(rows_of_ints)
def test_sums_are_those_of_the_rows(rows: list[list[int]]) -> None:
    sums = Ragged.from_rows(rows, np.int64).sums()
    assert sums.dtype == np.float64
    assert sums.tolist() == [float(sum(row)) for row in rows]


def test_a_row_that_is_not_finite_or_huge_spoils_no_other_sum() -> None:
    sums = Ragged.from_rows([[1e300, 1e300], [-np.inf], [], [0.1, 0.2], [np.nan], [1.0]], np.float64).sums()
    assert sums[[0, 2, 3, 5]].tolist() == [2e300, 0.0, 0.1 + 0.2, 1.0]
    assert sums[1] == -np.inf
    assert np.isnan(sums[4])


def test_sums_keep_the_inner_shape() -> None:
    ragged = Ragged.from_rows([np.ones((2, 3)), np.zeros((0, 3)), np.full((1, 3), 5.0)])
    assert ragged.sums().tolist() == [[2.0] * 3, [0.0] * 3, [5.0] * 3]


def test_an_empty_row_does_not_make_floats_of_ints() -> None:
    assert Ragged.from_rows([[1, 2], [], [3]]).values.dtype.kind == "i"


def test_no_rows_have_the_type_and_inner_shape_asked_for() -> None:
    empty = Ragged.from_rows([], np.int16, inner=(4, 2))
    assert (len(empty), empty.values.shape, empty.values.dtype) == (0, (0, 4, 2), np.int16)
    assert lists(Ragged.concat([empty, empty])) == []
    assert empty.sums().shape == (0, 4, 2)


@pytest.mark.parametrize(
    ("values", "offsets"), [(3, [0, 2]), (3, [1, 3]), (3, [0, 2, 1, 3]), (3, []), (3, [[0, 3]]), (0, [0, 1])]
)
def test_offsets_must_describe_the_values(values: int, offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Ragged(np.zeros(values), np.array(offsets, dtype=np.int64))


def test_a_mask_is_refused_rather_than_taken_for_numbers() -> None:
    ragged = Ragged.from_rows([[1], [2]])
    for wrong in ([True, False], [0.0, 1.0]):
        with pytest.raises(TypeError, match="flatnonzero"):
            ragged.select(wrong)


def test_rows_outside_are_an_error() -> None:
    ragged = Ragged.from_rows([[1], [2]])
    assert ragged[-1].tolist() == [2]
    for row in (2, -3):
        with pytest.raises(IndexError):
            ragged[row]
    with pytest.raises(IndexError):
        ragged.select([2])


def test_equals_sees_offsets_values_and_dtype() -> None:
    ragged = Ragged.from_rows([[1, 2], [3]], np.int32)
    assert ragged.equals(ragged.like(ragged.values.copy()))
    for other in ([[1], [2, 3]], [[1, 2], [4]], [[1, 2, 3]]):
        assert not ragged.equals(Ragged.from_rows(other, np.int32))
    assert not ragged.equals(ragged.like(ragged.values.astype(np.int64)))
    with pytest.raises(ValueError, match="offsets"):
        ragged.like(np.zeros(2))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[1, 2], ["a"]], "row 0 holds numbers and row 1 texts"),
        ([[], [1.5], [], ["a"]], "row 1 holds numbers and row 3 texts"),
        ([[1], [2, "a", 3]], "row 1 holds texts at 1;"),
        ([["a", b"b"]], "row 0 holds bytes at 1;"),
        ([[1], [2, None]], "row 1 holds objects at 1;"),
        ([[None]], "row 0 holds objects at 0;"),
    ],
)
def test_values_of_several_kinds_are_refused_with_their_place(rows: list[list[object]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Ragged.from_rows(rows)  # type: ignore[arg-type]


def test_values_of_one_kind_are_joined() -> None:
    assert lists(Ragged.from_rows([["a", "bc"], []])) == [["a", "bc"], []]  # type: ignore[comparison-overlap]
    assert Ragged.from_rows([[True], [2], [0.5]]).values.tolist() == [1.0, 2.0, 0.5]
    assert Ragged.from_rows([np.array([[1, 2]]), np.zeros((0, 2), dtype=int)]).values.shape == (1, 2)


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3), max_size=4))
def test_joined_rows_are_concatenated(parts: list[list[list[int]]]) -> None:
    column = Ragged.from_rows([row for part in parts for row in part], np.int32)
    joined = column.joined([len(part) for part in parts])
    assert [row.tolist() for row in joined] == [[value for row in part for value in row] for part in parts]
