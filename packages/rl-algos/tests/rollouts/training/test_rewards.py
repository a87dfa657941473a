import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_builder import make_prompt, make_rollout

from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.config import RewardScalingConfig, RewardShapingConfig
from rl_algos.rollouts.training.rewards import overlong_share, repeated_share, scale_rewards, trained_rewards
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import SegmentContext, Turn


def test_scaling_maps_the_ends_of_the_range_and_clamps_outside():
    scaling = RewardScalingConfig(enabled=True, source_min=-1, source_max=3, target_min=0, target_max=10)
    scaled = scale_rewards(np.array([-5.0, -1.0, 1.0, 3.0, 9.0, np.nan]), scaling)
    np.testing.assert_array_equal(scaled, [0, 0, 5, 10, 10, np.nan])


def test_scaling_that_is_off_changes_nothing():
    rewards = np.array([-5.0, 7.0])
    assert scale_rewards(rewards, RewardScalingConfig()) is rewards


def test_the_length_penalty_grows_over_the_buffer_alone():
    shaping = RewardShapingConfig(max_response_length=100, overlong_buffer_length=20)
    np.testing.assert_allclose(overlong_share(np.array([10, 80, 90, 100, 150]), shaping), [0, 0, 0.5, 1, 1])


def group_of(*rollouts):
    return RolloutGroup.of(PROMPT, rollouts)


def shaped(groups, *, max_turns=1, **settings):
    shaping = RewardShapingConfig(**{"enabled": True, "overlong_buffer_penalty": 0.0} | settings)
    return trained_rewards(groups, GRPOConfig(reward_shaping=shaping, max_rollout_turns=max_turns)).tolist()


PROMPT = make_prompt()


def test_rewards_are_scaled_and_then_shaped_and_failed_ones_stay_nan():
    rollouts = (
        make_rollout(PROMPT, 0.5, sampled=(7,) * 10),
        make_rollout(PROMPT, 1.0),
        make_rollout(PROMPT, 1.0, status="failed"),
    )
    config = GRPOConfig(
        reward_scaling=RewardScalingConfig(enabled=True, target_max=4.0),
        reward_shaping=RewardShapingConfig(
            enabled=True, max_response_length=10, overlong_buffer_length=5, overlong_buffer_penalty=3.0
        ),
    )
    found = trained_rewards([group_of(*rollouts)], config)
    np.testing.assert_array_equal(found, [0.5 * 4 - 3, 4.0, np.nan])


def test_a_level_of_effort_has_a_limit_of_its_own():
    low, high, plain = (
        make_prompt(name, **info) for name, info in (("a", {"effort": "low"}), ("b", {"effort": "high"}), ("c", {}))
    )
    groups = [RolloutGroup.of(each, [make_rollout(each, 1.0, sampled=(7,) * 10)]) for each in (low, high, plain)]
    settings = {"overlong_buffer_length": 4, "overlong_buffer_penalty": 1.0, "max_response_length": 12}
    assert shaped(groups, effort_levels={"low": 8, "high": 100}, **settings) == [0.0, 1.0, 0.5]
    assert shaped(groups, **settings) == [0.5, 0.5, 0.5]


def test_short_right_answers_gain_and_long_ones_lose_within_their_group():
    rewards_and_lengths = [(1.0, 2), (1.0, 10), (1.0, 6), (0.0, 2), (0.0, 10), (0.0, 8)]
    rollouts = [make_rollout(PROMPT, reward, sampled=(7,) * length) for reward, length in rewards_and_lengths]
    failed = make_rollout(PROMPT, 1.0, sampled=(7,) * 99, status="failed")
    alike = group_of(make_rollout(PROMPT, 1.0), make_rollout(PROMPT, 0.0))
    found = shaped([group_of(*rollouts, failed), alike], length_penalty=2.0)
    expected = [1 + 2 * 0.5, 1 - 2 * 0.5, 1.0, 0.0, -2 * 0.5, -2 * 0.25, np.nan, 1.0, 0.0]
    np.testing.assert_allclose(found, expected)


def test_responses_that_ran_into_a_limit_keep_a_share_of_their_reward():
    cut, ended = make_rollout(PROMPT, 2.0, stop_reason="length", status="truncated"), make_rollout(PROMPT, 2.0)
    assert shaped([group_of(cut, ended)], stop_properly_penalty_coef=0.25) == [0.5, 2.0]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6))
def test_the_repeated_share_is_that_of_runs_seen_before(tokens, size):
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    expected = 1 - len(set(runs)) / len(runs) if len(runs) > 1 else 0.0
    assert repeated_share(np.array(tokens, np.int32), size) == pytest.approx(expected)


def test_repetition_costs_its_share_of_the_penalty_and_prompts_do_not_count():
    loop, plain = make_rollout(PROMPT, 1.0, sampled=(5, 6) * 4), make_rollout(PROMPT, 1.0, sampled=(1, 2, 3, 4))
    assert shaped([group_of(loop, plain)], repetition_penalty=2.0, repetition_ngram_size=2) == [
        pytest.approx(1 - 2 * 5 / 7),
        1.0,
    ]


def test_penalties_of_text_look_at_every_turn():
    said, calls = "[THINK]a[/THINK]b", Turn("a</think>b", None, {}, has_invalid_call=True)
    turns = [(Turn(said, None, {}),), (Turn("<think>a", None, {}), calls), (Turn("b", None, {}),)]
    rollouts = [dataclasses.replace(make_rollout(PROMPT, 1.0), turns=each) for each in turns]
    found = shaped([group_of(*rollouts)], malformed_thinking_penalty=0.25, invalid_tool_call_penalty=0.5)
    assert found == [1.0, 0.25, 0.75]
    agents = [
        dataclasses.replace(each, contexts=(SegmentContext((), (), num_turns=len(each.turns), call=1),))
        for each in rollouts
    ]
    assert shaped([group_of(*agents)], malformed_thinking_penalty=0.25, invalid_tool_call_penalty=0.5) == found
