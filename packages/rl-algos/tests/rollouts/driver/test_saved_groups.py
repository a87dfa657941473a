"""Finished groups in a checkpoint."""

import dataclasses

import numpy as np
import pytest
from rollouts_builder import make_group, make_plays, make_prompt, make_rollout, make_split_rollout

from rl_algos.rollouts.driver.saved import group_from, group_state
from rl_core.data.batch import Batch, RemoteRows
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout


def whole_group():
    """A group with everything a group can have: a failure, numbers of the environment, routed experts."""
    prompt = make_prompt("p7", difficulty="hard")
    routed = np.arange(5 * 2 * 3, dtype=np.int16).reshape(5, 2, 3)
    good = dataclasses.replace(make_rollout(prompt, 0.5), routed_experts=routed, info={"tests_passed": 3, "note": "x"})
    return RolloutGroup.of(prompt, [good, Rollout.failed(prompt, "the verifier hung")])


def assert_equal(found, expected):
    assert found.prompt is expected.prompt
    assert found.rollouts == expected.rollouts
    assert set(found.columns) == set(expected.columns)
    for name in expected.columns:
        ours, theirs = found.columns.ragged(name), expected.columns.ragged(name)
        assert ours.values.dtype == theirs.values.dtype
        np.testing.assert_array_equal(ours.values, theirs.values)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)


def test_a_group_comes_back_as_it_was():
    group = whole_group()
    assert_equal(group_from(group_state(group), group.prompt), group)


def test_segments_come_back_as_they_were():
    prompt = make_prompt("p7")
    group = RolloutGroup.of(prompt, [make_split_rollout(prompt, 1.0, (4, 5), (6,)), make_rollout(prompt, 0.0)])
    assert_equal(group_from(group_state(group), prompt), group)


def test_plays_of_several_agents_come_back_as_they_were():
    group = make_plays("p7", [("first", "", 1.0), ("second", "a", -1.0)], [("first", "", 0.5)])
    assert_equal(group_from(group_state(group), group.prompt), group)


def test_a_group_that_was_saved_without_agents_is_one_agents():
    group = whole_group()
    state = group_state(group)
    old = {name: value for name, value in state["rollouts"].items() if name not in ("agent", "peers", "play")}
    assert_equal(group_from({**state, "rollouts": old}, group.prompt), group)


def test_columns_that_lie_elsewhere_are_fetched():
    group = whole_group()

    class Store:
        def fetch(self):
            return group.columns

    rows = RemoteRows.of(Store(), group.columns.lengths)
    remote = dataclasses.replace(group, columns=Batch(rows.columns(list(group.columns))))
    assert_equal(group_from(group_state(remote), group.prompt), group)


def test_a_group_of_another_prompt_is_refused():
    group = make_group("p1", [0.0, 1.0])
    with pytest.raises(ValueError, match="the saved rollouts are of prompt p1, not of p2"):
        group_from(group_state(group), make_prompt("p2"))
