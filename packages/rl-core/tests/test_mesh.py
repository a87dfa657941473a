from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.model import AXES, Coordinates

sizes = st.dictionaries(st.sampled_from(["dp", "pp", "cp", "tp"]), st.integers(1, 3))


def every_rank(size: dict[str, int]) -> list[Coordinates]:
    ranks: list[dict[str, int]] = [{}]
    for axis, count in size.items():
        ranks = [{**rank, axis: index} for rank in ranks for index in range(count)]
    return [Coordinates(rank, size) for rank in ranks]


@given(sizes)
def test_exactly_one_rank_of_each_shard_leads(size: dict[str, int]) -> None:
    ranks = every_rank(size)
    leaders = [rank for rank in ranks if rank.leads]
    assert sorted(rank.on("dp") for rank in leaders) == list(range(size.get("dp", 1)))


@given(sizes)
def test_an_axis_that_is_left_out_has_one_rank(size: dict[str, int]) -> None:
    for rank in every_rank(size):
        assert all(0 <= rank.on(axis) < rank.along(axis) for axis in AXES)
        assert all(rank.along(axis) == 1 for axis in AXES if axis not in size)
    assert Coordinates({"tp": 0}, {}).leads


def test_the_last_pipeline_stage_leads_as_it_has_the_logits() -> None:
    assert [Coordinates({"pp": i}, {"pp": 3}).leads for i in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("index", "size", "says"),
    [
        ({"tp": 2}, {"tp": 2}, "index 2"),
        ({"tp": -1}, {"tp": 2}, "index -1"),
        ({"tp": 1}, {}, "size 1"),
        ({"xp": 0}, {"xp": 1}, "unknown mesh axis 'xp'"),
        ({}, {"xp": 1}, "unknown mesh axis 'xp'"),
        ({}, {"dp": 2}, "index"),
        ({}, {"dp": 0}, "size 0; a size is at least 1"),
    ],
)
def test_impossible_places_are_refused(index: dict[str, int], size: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Coordinates(index, size)


def test_coordinates_cross_processes() -> None:
    place = Coordinates({"dp": 1}, {"dp": 2})
    assert pickle.loads(pickle.dumps(place)) == place
