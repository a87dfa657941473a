"""Advantages and returns beside loops written from the papers, one token at a time."""

import numpy as np
import pytest
from gae_oracle import written_out
from hypothesis import given
from hypothesis import strategies as st

from rl_algos.ppo.estimates import gae, length_adaptive_lambda, reward_at_last
from rl_core.data.ragged import Ragged

LENGTHS = (1, 9, 4, 70, 2, 6)


def make_rows(seed):
    """Rewards and values at random, NaN off the mask; prompts and observations between turns."""
    random = np.random.default_rng(seed)
    mask = Ragged.from_rows([(random.random(n) < 0.6).astype(np.uint8) for n in LENGTHS], np.uint8)
    off = mask.values == 0
    columns = [mask.like(np.where(off, np.nan, random.normal(size=len(off)))) for _ in range(2)]
    return *columns, mask, random.normal(size=len(LENGTHS))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
def test_advantages_are_those_of_the_recursion_over_sampled_tokens(seed, gamma, lam):
    rewards, values, mask, last = make_rows(seed)
    found = gae(rewards, values, mask, last_values=last, gamma=gamma, lam=lam)
    rows = zip(rewards, values, mask, last, strict=True)
    expected = [written_out(*row, gamma, lam) for row in rows]
    np.testing.assert_allclose(found.values, np.concatenate(expected), rtol=1e-10, atol=1e-12)


def test_every_row_may_have_a_lambda_of_its_own():
    rewards, values, mask, last = make_rows(7)
    lam = np.linspace(0, 1, len(mask))
    found = gae(rewards, values, mask, last_values=last, gamma=0.97, lam=lam)
    rows = zip(rewards, values, mask, last, lam, strict=True)
    expected = [written_out(r, v, m, end, 0.97, of_row) for r, v, m, end, of_row in rows]
    np.testing.assert_allclose(found.values, np.concatenate(expected), rtol=1e-10, atol=1e-12)


def test_with_lambda_1_the_returns_are_the_rewards_to_come():
    rewards, values, mask, _ = make_rows(3)
    found = gae(rewards, values, mask, last_values=np.zeros(len(mask)), gamma=1.0, lam=1.0)
    for row in range(len(mask)):
        sampled = mask[row] > 0
        to_come = rewards[row][sampled][::-1].cumsum()[::-1]
        np.testing.assert_allclose((found[row] + values[row])[sampled], to_come, atol=1e-12)


def test_observations_between_turns_are_neither_valued_nor_discounted():
    mask = Ragged.from_rows([[0, 1, 0, 0, 0, 1, 1], [0, 1, 1, 1]], np.uint8)
    values = mask.like(np.array([9.0, 1, 9, 9, 9, 2, 3, 9, 1, 2, 3]))
    rewards = reward_at_last(np.array([4.0, 4.0]), mask)
    found = gae(rewards, values, mask, last_values=np.zeros(2), gamma=0.9, lam=0.8)
    assert found[0][[1, 5, 6]].tolist() == found[1][1:].tolist()
    assert not found[0][[0, 2, 3, 4]].any()


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5))
def test_a_reward_is_placed_on_the_last_sampled_token_and_on_none_of_a_row_without_any(rows):
    mask = Ragged.from_rows(rows, np.uint8)
    rewards = np.where(mask.sums() > 0, np.arange(1.0, len(rows) + 1), np.nan)
    for placed, row, reward in zip(reward_at_last(rewards, mask), rows, rewards, strict=True):
        expected = [0.0] * len(row)
        if 1 in row:
            expected[len(row) - 1 - row[::-1].index(1)] = reward
        assert placed.tolist() == expected


def test_penalties_lower_the_reward_of_their_own_token():
    mask = Ragged.from_rows([[0, 1, 0, 1]], np.uint8)
    penalties = mask.like(np.array([np.nan, 0.5, np.nan, 0.25]))
    assert reward_at_last(np.array([2.0]), mask, penalties)[0].tolist() == [0.0, -0.5, 0.0, 1.75]


def test_the_adaptive_lambda_rises_with_the_length_and_is_never_negative():
    found = length_adaptive_lambda(np.array([0, 10, 20, 40, 2000]), 0.05)
    np.testing.assert_allclose(found, [0, 0, 0, 0.5, 0.99])
    # the weights of a long row add up to alpha times its length
    assert (found[-1] ** np.arange(2000)).sum() == pytest.approx(0.05 * 2000, rel=1e-4)


def test_no_rows_and_rows_without_sampled_tokens_have_no_advantages():
    for lengths in ([], [0], [3, 2]):
        mask = Ragged.from_rows([np.zeros(n) for n in lengths], np.uint8)
        zeros = mask.like(np.zeros(len(mask.values)))
        found = gae(zeros, zeros, mask, last_values=np.ones(len(lengths)), gamma=1.0, lam=0.9)
        assert found.lengths.tolist() == lengths
        assert not found.values.any()
