"""The order in which datasets have their turn."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algos.data.stream import Shares

weights = st.lists(st.floats(0.05, 20), min_size=2, max_size=5)


@given(first=weights, data=st.data(), before=st.integers(0, 50))
def test_draws_after_a_change_follow_the_new_weights(first, data, before):
    second = data.draw(st.lists(st.floats(0.05, 20), min_size=len(first), max_size=len(first)))
    shares = Shares(first)
    for _ in range(before):
        shares.next()
    shares.change(second)
    drawn = Counter(shares.next() for _ in range(200))
    for which, weight in enumerate(second):
        # a dataset has its turn when it is due, so it is at most a draw early or late beside any other
        assert abs(drawn[which] - 200 * weight / sum(second)) <= len(second)


@given(weights)
def test_a_change_to_the_same_weights_changes_nothing(given):
    one, other = Shares(given), Shares(given)
    for _ in range(60):
        other.change(given)
        assert one.next() == pytest.approx(other.next())


def test_frequent_changes_hold_no_dataset_back():
    shares = Shares([1.0, 0.1])
    drawn = Counter()
    for step in range(200):
        shares.change([1.0, 0.1 if step % 2 else 0.11])
        drawn[shares.next()] += 1
    assert drawn[1] == pytest.approx(200 * 0.105 / 1.105, abs=2)


@given(weights, weights, st.integers(0, 30))
def test_a_restored_position_goes_on_with_the_changed_weights(first, second, before):
    shares = Shares(first)
    second = (second * len(first))[: len(first)]
    for _ in range(before):
        shares.next()
    shares.change(second)
    shares.next()
    restored = Shares(first)
    restored.restore(json.loads(json.dumps(shares.state())))
    assert [restored.next() for _ in range(30)] == [shares.next() for _ in range(30)]


def test_a_position_of_draws_alone_is_read():
    shares, restored = Shares([2.0, 1.0]), Shares([2.0, 1.0])
    for _ in range(7):
        shares.next()
    restored.restore({"drawn": shares.state()["drawn"]})
    assert [restored.next() for _ in range(9)] == [shares.next() for _ in range(9)]


def test_a_member_of_weight_0_is_not_drawn_and_begins_an_interval_when_it_returns():
    shares = Shares([1.0, 0.0])
    assert [shares.next() for _ in range(5)] == [0] * 5
    shares.change([1.0, 1.0])
    assert [shares.next() for _ in range(6)] == [0, 0, 1, 0, 1, 0]
    shares.change([0.0, 1.0])
    restored = Shares([1.0, 0.0])
    restored.restore(json.loads(json.dumps(shares.state())))
    assert [shares.next() for _ in range(4)] == [restored.next() for _ in range(4)] == [1] * 4
    for each in (shares, restored):
        each.change([3.0, 1.0])
    drawn = [shares.next() for _ in range(40)]
    assert Counter(drawn) == {0: 30, 1: 10}
    assert [restored.next() for _ in range(40)] == drawn
