import logging
from dataclasses import replace

import pytest
from rollouts_builder import make_group, make_prompt, make_rollout

from rl_algos.rollouts.driver.watches import PATIENCE, RewardWatch
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import SegmentContext, Turn


def answered(prompt_id, *texts, contexts=()):
    """A group whose rollouts end with these texts and earn nothing."""
    prompt = make_prompt(prompt_id)
    return RolloutGroup.of(
        prompt, [replace(make_rollout(prompt, 0.0), turns=(Turn(text, None, {}),), contexts=contexts) for text in texts]
    )


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("contexts", [(), (SegmentContext((), (), num_turns=1, call=1),)], ids=["turns", "agent"])
def test_rollouts_that_earn_nothing_are_reported_once_with_what_they_answered(said, contexts):
    watch = RewardWatch()
    for step in range(PATIENCE + 3):
        assert len(said()) == (step >= PATIENCE)
        first = answered("a", "left", "left", "go right", contexts=contexts)
        watch.observe([first, answered("b", "left", contexts=contexts)])
    (message,) = said()
    assert message.startswith(f"all {4 * PATIENCE} rollouts of {PATIENCE} steps in a row have the same reward, 0,")
    assert "most often they end with 'left' (3x), 'go right' (1x)." in message
    assert "rl env run" in message


def test_other_equal_rewards_are_reported_with_their_value(said):
    watch = RewardWatch()
    for _ in range(PATIENCE):
        watch.observe([make_group("a", [-1.0, -1.0])])
    assert "the same reward, -1," in said()[0]
    assert "tells such responses apart" in said()[0]


@pytest.mark.parametrize("other", [[0.0, 1.0], [1.0, 1.0]])
def test_only_successive_steps_count(said, other):
    watch = RewardWatch()
    for rewards in (*[[0.0, 0.0]] * (PATIENCE - 1), other, *[[0.0, 0.0]] * (PATIENCE - 1), other):
        watch.observe([make_group("a", rewards)])
    assert said() == []
    for _ in range(PATIENCE):
        watch.observe([make_group("a", [0.0, 0.0])])
    assert f"all {2 * PATIENCE} rollouts of {PATIENCE} steps in a row have the same reward, 0," in said()[0]


def test_rollouts_that_all_earn_what_the_first_did_not_are_no_reason_for_a_warning(said):
    watch = RewardWatch()
    for rewards in ([0.0, 1.0], *[[1.0, 1.0]] * 2 * PATIENCE):
        watch.observe([make_group("a", rewards)])
    assert said() == []


def test_failed_rollouts_and_rollouts_without_an_environment_say_nothing(said):
    watch = RewardWatch()
    for _ in range(2 * PATIENCE):
        watch.observe([make_group("a", [float("nan"), float("nan")])])
        watch.observe([])
    assert said() == []
