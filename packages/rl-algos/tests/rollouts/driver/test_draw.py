import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algos.rollouts.driver import draw as draw_module
from rl_algos.rollouts.driver.draw import NOT_BEGUN, Draw, DrawState, plan_batch
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


def test_the_example_of_the_batch_rule_holds():
    result = doctest.testmod(draw_module)
    assert (result.attempted, result.failed) == (6, 0)


def test_a_batch_at_the_end_of_the_data_is_what_there_is():
    assert plan_batch({}, 4).select(set()) == []
    assert plan_batch({7: 1}, 4).select({7}) == [7]


@given(
    versions=st.lists(st.integers(1, 4), max_size=12),
    num_groups=st.integers(0, 8),
    order=st.randoms(use_true_random=False),
)
def test_no_draw_that_stays_is_older_than_one_that_a_batch_takes(versions, num_groups, order):
    begun_at = dict(enumerate(sorted(versions)))
    plan = plan_batch(begun_at, num_groups)
    numbers = list(begun_at)
    order.shuffle(numbers)
    finished = set()
    for number in numbers:
        if plan.select(finished) is not None:
            break
        finished.add(number)
    chosen = plan.select(finished)
    assert len(chosen) == min(num_groups, len(begun_at))
    assert set(chosen) <= finished
    left = begun_at.keys() - set(chosen)
    assert all(begun_at[kept] >= begun_at[taken] for kept in left for taken in chosen)
