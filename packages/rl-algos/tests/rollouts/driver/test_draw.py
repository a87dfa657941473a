import doctest
import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algos.rollouts.config import Sampler
from rl_algos.rollouts.driver import draw as draw_module
from rl_algos.rollouts.driver.draw import NOT_BEGUN, BatchRule, Draw, DrawState
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout

PROMPT = Prompt("p", (), np.zeros(1, np.int32), "math")
GROUP = RolloutGroup.of(PROMPT, [Rollout.failed(PROMPT, "no engine")])
EVENTS = {
    "begin": lambda draw: draw.begin(5),
    "finish": lambda draw: draw.finish(GROUP),
    "collect": lambda draw: draw.collect(),
    "set_aside": lambda draw: draw.set_aside("equal rewards"),
    "restore_turns": lambda draw: draw.restore_turns(2, ({},)),
    "restore_group": lambda draw: draw.restore_group(2, GROUP),
    "discard": lambda draw: draw.discard(),
}
PATHS = {
    DrawState.WAITING: (),
    DrawState.RESTORED: ("restore_turns",),
    DrawState.UNDER_WAY: ("begin",),
    DrawState.FINISHED: ("begin", "finish"),
    DrawState.COLLECTED: ("begin", "finish", "collect"),
    DrawState.SET_ASIDE: ("begin", "finish", "collect", "set_aside"),
}


def drawn(state):
    draw = Draw(0, PROMPT)
    for event in PATHS[state]:
        EVENTS[event](draw)
    return draw


def documented_transitions():
    """State, event and next state of every row of the tables in the docstring of `DrawState`."""
    rows = [line.split() for line in DrawState.__doc__.splitlines()]
    names = {state.name for state in DrawState}
    return {(row[0], row[1].strip("`:"), row[-1]) for row in rows if row and row[0] in names and row[-1] in names}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PATHS, EVENTS)))
def test_draw_changes_state_as_the_table_documents_and_refuses_other_events(state, event):
    draw = drawn(state)
    assert draw.state is state
    allowed = {(before, name): after for before, name, after in documented_transitions()}
    if (state.name, event) in allowed:
        EVENTS[event](draw)
        assert draw.state.name == allowed[state.name, event]
    else:
        with pytest.raises(AssertionError, match=f"draw 0 is {state.value}"):
            EVENTS[event](draw)


def test_the_table_has_every_transition():
    assert len(documented_transitions()) == 9


def test_age_of_a_restored_draw_counts_from_its_first_begin():
    draw = drawn(DrawState.RESTORED)
    draw.begin(5)
    assert draw.begun_at == 2
    fresh = drawn(DrawState.WAITING)
    fresh.begin(5)
    assert fresh.begun_at == 5


def test_discarded_draw_starts_from_nothing():
    draw = drawn(DrawState.RESTORED)
    draw.discard()
    assert (draw.begun_at, draw.turns) == (NOT_BEGUN, ())


def test_the_examples_of_the_batch_rule_hold():
    result = doctest.testmod(draw_module)
    assert (result.attempted, result.failed) == (9, 0)


@pytest.mark.parametrize("sampler", get_args(Sampler))
def test_a_batch_at_the_end_of_the_data_is_what_there_is(sampler):
    rule = BatchRule(sampler, 1, 4, window=4)
    assert rule.plan({}, 4, 1).select(set()) == []
    assert rule.plan({7: 1}, 4, 1).select({7}) == [7]


@given(
    versions=st.lists(st.integers(1, 4), max_size=12),
    num_groups=st.integers(0, 8),
    order=st.randoms(use_true_random=False),
)
def test_no_draw_that_stays_is_older_than_one_that_a_batch_takes(versions, num_groups, order):
    begun_at = dict(enumerate(sorted(versions)))
    plan = BatchRule("weight_fifo", 3, 3).plan(begun_at, num_groups, version=4)
    chosen = selected(plan, begun_at, order)
    assert len(chosen) == min(num_groups, len(begun_at))
    left = begun_at.keys() - set(chosen)
    assert all(begun_at[kept] >= begun_at[taken] for kept in left for taken in chosen)


def selected(plan, begun_at, order):
    """The batch, with draws that finish in a random order; nothing is decided by draws that finish later."""
    numbers = list(begun_at)
    order.shuffle(numbers)
    finished = set()
    for number in numbers:
        if plan.select(finished) is not None:
            break
        finished.add(number)
    chosen = plan.select(finished)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= finished
    return chosen


@given(
    sampler=st.sampled_from(get_args(Sampler)),
    max_staleness=st.integers(1, 4),
    per_step=st.integers(1, 4),
    num_ahead=st.integers(0, 16),
    window=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_every_step_has_its_groups_and_none_is_older_than_the_bound(
    sampler, max_staleness, per_step, num_ahead, window, order
):
    rule = BatchRule(sampler, max_staleness, per_step, window)
    num_ahead = min(num_ahead, max_staleness * per_step)
    begun_at, drawn = {}, 0
    for version in range(1, 4 * max_staleness + 4):
        while len(begun_at) < per_step + num_ahead:
            begun_at[drawn], drawn = version, drawn + 1
        chosen = selected(rule.plan(begun_at, per_step, version), begun_at, order)
        assert len(chosen) == per_step
        assert all(version - begun_at.pop(draw) <= max_staleness for draw in chosen)


def test_in_order_the_batch_does_not_depend_on_which_groups_finish_first():
    plan = BatchRule("in_order", 2, 2).plan({4: 1, 5: 1, 6: 1, 7: 2}, 2, version=2)
    assert plan.select({5, 6, 7}) is None
    assert plan.select({4, 5, 6, 7}) == [4, 5]
    # a resumed run begins draws again, with newer weights than finished draws after them
    plan = BatchRule("in_order", 1, 2).plan({4: 3, 5: 3, 6: 2, 7: 2}, 2, version=3)
    assert plan.select({4, 5, 6}) is None
    assert plan.select({6, 7}) == [6, 7]


def test_a_window_limits_how_far_a_quick_group_overtakes_slow_ones():
    begun_at = dict.fromkeys(range(6), 1)
    plan = BatchRule("windowed", 2, 2, window=3).plan(begun_at, 2, version=1)
    assert plan.select({2, 3, 4, 5}) is None
    assert plan.select({1, 2, 5}) == [1, 2]
    assert BatchRule("ready_first", 2, 2).plan(begun_at, 2, version=1).select({4, 5}) == [4, 5]


def test_groups_that_later_steps_could_not_take_in_time_are_waited_for_early():
    # 5 groups are due in step 3 at the latest; steps 2 and 3 take 2 each, so step 1 takes at least 1 of them
    begun_at = {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    rule = BatchRule("ready_first", 2, 2)
    assert rule.plan(begun_at, 2, version=1).select({0, 5}) == [0, 5]
    later = {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert rule.plan(later, 2, version=2).select({4, 5}) is None  # 4 groups for step 2 and 3
    assert rule.plan(later, 2, version=2).select({1, 3, 4, 5}) == [1, 3]
