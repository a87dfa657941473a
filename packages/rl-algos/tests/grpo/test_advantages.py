import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algos.grpo.advantages import grpo, rloo
from rl_algos.policy_gradient.advantages import clip_advantages


def test_one_winner_among_four_equals_the_closed_form():
    # mean 1/4, sample standard deviation 1/2
    advantages = grpo(np.array([1.0, 0, 0, 0]), np.zeros(4), eps=0)
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)


@pytest.mark.parametrize("estimate", [grpo, rloo])
@pytest.mark.parametrize("num_members", [2, 3, 16, 64])
def test_a_group_that_differs_in_one_member_equals_the_closed_form(num_members, estimate):
    # rewards 0 but for one 1: mean 1/n, deviation 1/sqrt(n); leave-one-out scales by n/(n-1)
    rewards = np.zeros(num_members)
    rewards[1] = 1.0
    advantages = estimate(rewards, np.zeros(num_members), eps=0)
    n = num_members
    scale = n / (n - 1) if estimate is rloo else 1.0
    assert advantages[1] == pytest.approx(scale * (1 - 1 / n) * np.sqrt(n), rel=1e-12)
    np.testing.assert_allclose(np.delete(advantages, 1), -scale / np.sqrt(n), rtol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30, 1e30, -3.7])
@pytest.mark.parametrize("estimate", [grpo, rloo])
def test_equal_rewards_have_exactly_zero_advantage(reward, estimate):
    advantages = estimate(np.full(16, reward), np.zeros(16))
    assert np.array_equal(advantages, np.zeros(16))


@pytest.mark.parametrize("estimate", [grpo, rloo])
def test_rewards_that_differ_by_rounding_alone_have_no_advantage_worth_the_name(estimate):
    rewards = np.full(8, 0.3)
    rewards[3] = 0.1 + 0.2
    assert rewards[3] != 0.3
    assert np.abs(estimate(rewards, np.zeros(8))).max() < 1e-9


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards = np.array([3.0, 1.0, 5.0, 0.0])
    advantages = rloo(rewards, np.zeros(4), normalize=False)
    others = [np.delete(rewards, i).mean() for i in range(4)]
    np.testing.assert_allclose(advantages, rewards - others, rtol=1e-14)


def test_failed_rollouts_count_for_nothing():
    with_failure = grpo(np.array([1.0, np.nan, 0.0, 0.0]), np.zeros(4))
    without = grpo(np.array([1.0, 0.0, 0.0]), np.zeros(3))
    assert with_failure[1] == 0.0
    np.testing.assert_array_equal(np.delete(with_failure, 1), without)


def test_a_lone_survivor_has_no_advantage():
    assert np.array_equal(grpo(np.array([np.nan, 1.0, np.nan]), np.zeros(3)), np.zeros(3))


@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.sampled_from([grpo, rloo]),
)
def test_groups_do_not_touch_one_another_wherever_their_rows_lie(groups, random, estimate):
    rewards = np.array([reward for group in groups for reward in group])
    ids = np.array([i for i, group in enumerate(groups) for _ in group])
    order = np.array(random.sample(range(len(rewards)), len(rewards)))
    mixed = np.empty(len(rewards))
    mixed[order] = estimate(rewards[order], ids[order])
    alone = np.concatenate([estimate(np.array(group), np.zeros(len(group))) for group in groups])
    np.testing.assert_allclose(mixed, alone, rtol=1e-9, atol=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_advantages_of_a_group_add_up_to_zero(rewards):
    assert abs(grpo(np.array(rewards), np.zeros(len(rewards))).sum()) < 1e-6


def test_clipping_leaves_an_open_side_open():
    advantages = np.array([-5.0, 0.0, 5.0])
    assert clip_advantages(advantages, None, None) is advantages
    np.testing.assert_array_equal(clip_advantages(advantages, -1.0, None), [-1, 0, 5])
    np.testing.assert_array_equal(clip_advantages(advantages, None, 2.0), [-5, 0, 2])
