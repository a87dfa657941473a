"""Blame from matrices of bandwidths that are made up."""

from itertools import combinations, permutations

import pytest

from rl_launch.doctor.cluster.judgement import blame
from rl_launch.doctor.cluster.measurements import rounds

NAMES = [f"n{number}" for number in range(8)]


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(count):
    found = rounds(NAMES[:count])
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in combinations(NAMES[:count], 2)}
    for pairs in found:
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
    assert len([pairs for pairs in found if pairs]) == (count - 1 if count % 2 == 0 else count) * (count > 1)


def matrix(count, *, slow=lambda sender, receiver: False, rate=1.0):
    return {pair: rate if slow(*pair) else 10.0 for pair in permutations(NAMES[:count], 2)}


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_nobody_is_blamed_on_an_even_network(count):
    found = blame(matrix(count))
    assert not found.nodes
    assert not found.pairs
    assert found.rate == 10.0


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize(
    ("slow", "verb"),
    [
        (lambda sender, receiver: "n1" in (sender, receiver), "sends"),
        (lambda sender, receiver: sender == "n1", "sends"),
        (lambda sender, receiver: receiver == "n1", "receives"),
    ],
)
def test_a_slow_node_is_blamed_alone_and_its_pairs_are_not(count, slow, verb):
    found = blame(matrix(count, slow=slow))
    assert list(found.nodes) == ["n1"]
    assert found.nodes["n1"].verb == verb
    assert found.nodes["n1"].rate == 1.0
    assert not found.pairs
    assert found.rate == 10.0


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_slow_pair_is_blamed_as_a_pair(count):
    both = blame(matrix(count, slow=lambda *pair: set(pair) == {"n0", "n2"}))
    assert not both.nodes
    assert set(both.pairs) == {("n0", "n2"), ("n2", "n0")}
    one_way = blame(matrix(count, slow=lambda *pair: pair == ("n2", "n0")))
    assert not one_way.nodes
    assert one_way.pairs == {("n2", "n0"): 1.0}


def test_two_slow_nodes_of_eight_are_both_blamed():
    found = blame(matrix(8, slow=lambda *pair: bool({"n3", "n6"} & set(pair))))
    assert set(found.nodes) == {"n3", "n6"}


def test_the_limit_is_half_of_the_median():
    assert not blame(matrix(4, slow=lambda *pair: "n1" in pair, rate=5.0)).nodes
    assert blame(matrix(4, slow=lambda *pair: "n1" in pair, rate=4.9)).nodes


def test_of_two_nodes_only_the_slower_direction_is_named():
    found = blame(matrix(2, slow=lambda *pair: pair == ("n0", "n1")))
    assert not found.nodes
    assert list(found.pairs) == [("n0", "n1")]


def test_a_node_that_nothing_reaches_is_blamed():
    found = blame(matrix(4, slow=lambda sender, receiver: receiver == "n2", rate=0.0))
    assert found.nodes["n2"].verb == "receives"
    assert blame({}).rate == 0.0
