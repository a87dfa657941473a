import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.rollouts.driver.ledger import Ledger, digest


def everything(ledger):
    """Each draw with all states that the ledger lists it under."""
    listed = [("pending", draw) for draw in ledger.pending()]
    listed += [(f"trained at {version}", draw) for version, draws in ledger.trained().items() for draw in draws]
    listed += [(f"dropped: {reason}", draw) for reason, draws in ledger.dropped().items() for draw in draws]
    return sorted(listed, key=lambda entry: entry[1])


def ids(count, start=0):
    return [f"p{index}" for index in range(start, start + count)]


def test_draws_are_numbered_in_order_and_pending():
    ledger = Ledger()
    assert ledger.draw(ids(2)) == range(2)
    assert ledger.draw(ids(3, 2)) == range(2, 5)
    assert ledger.pending() == [0, 1, 2, 3, 4]
    assert (ledger.num_drawn, ledger.num_pending) == (5, 5)


def test_a_draw_leaves_as_trained_or_as_dropped_for_a_reason():
    ledger = Ledger()
    ledger.draw(ids(5))
    ledger.train([3, 0], version=1)
    ledger.drop([1], version=1, reason="rewards are equal")
    ledger.train([2], version=2)
    assert ledger.pending() == [4]
    assert ledger.trained() == {1: [0, 3], 2: [2]}
    assert ledger.dropped() == {"rewards are equal": [1]}
    assert ledger.left() == {1: [0, 1, 3], 2: [2]}


def test_a_draw_leaves_once():
    ledger = Ledger()
    ledger.draw(ids(2))
    ledger.train([0], version=3)
    with pytest.raises(AssertionError, match="draw 0 left at version 3 already"):
        ledger.drop([0], version=4, reason="late")
    with pytest.raises(AssertionError, match="draw 7 was never made; 2 were"):
        ledger.train([7], version=4)


def test_digests_follow_from_the_ids_of_prompts():
    ledger = Ledger()
    ledger.draw(["a", "b", "a"])
    assert [ledger.digest(index) for index in range(3)] == [digest("a"), digest("b"), digest("a")]
    assert digest("a") != digest("b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": [1]}, "one version, reason and digest per draw, got 1, 2 and 2"),
        ({"versions": [1, -1]}, "a version of -1"),
        ({"reasons": [0, 2]}, "a reason of 2"),
        ({"reasons": [1, 1]}, "pending and dropped at once"),
    ],
)
def test_a_state_that_no_ledger_has_is_refused(change, message):
    ledger = Ledger()
    ledger.draw(ids(2))
    ledger.drop([1], version=1, reason="late")
    broken = {**ledger.state(), **{name: np.array(values) for name, values in change.items()}}
    with pytest.raises(ValueError, match=message):
        Ledger().restore(broken)


NAMES = ["draw", "train", "drop", "kill", "save"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 7)), max_size=60))
def test_whatever_happens_every_draw_is_in_one_state(actions):
    ledger, version, next_id = Ledger(), 1, 0
    expected: dict[int, str] = {}
    saved = (ledger.state(), dict(expected))
    for action, number in actions:
        pending = ledger.pending()
        some = pending[:: number + 1][:number]
        if action == "draw":
            expected |= dict.fromkeys(ledger.draw(ids(number, next_id)), "pending")
            next_id += number
        elif action == "train":
            ledger.train(some, version)
            expected |= dict.fromkeys(some, f"trained at {version}")
            version += 1
        elif action == "drop":
            ledger.drop(some, version, f"reason {number}")
            expected |= dict.fromkeys(some, f"dropped: reason {number}")
        elif action == "save":
            saved = (ledger.state(), dict(expected))
        else:
            state, expected = saved[0], dict(saved[1])
            ledger = Ledger()
            ledger.restore(state)
        assert everything(ledger) == [(state, draw) for draw, state in sorted(expected.items())]
        assert ledger.num_pending == len(ledger.pending())


def test_a_state_is_a_copy_of_plain_data():
    ledger = Ledger()
    ledger.draw(ids(3))
    state = ledger.state()
    ledger.train([0, 1, 2], version=1)
    assert state["versions"].tolist() == [0, 0, 0]
    json.dumps({name: np.asarray(value).tolist() for name, value in state.items()})
