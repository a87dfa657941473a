from math import comb

import numpy as np
import pytest

from rl_algos.evaluation.estimates import bootstrap_mean


def binomial_quantiles(count, probability, *levels):
    """The least numbers of successes whose cumulative probability reaches these levels."""
    terms = [comb(count, i) * probability**i * (1 - probability) ** (count - i) for i in range(count + 1)]
    return np.searchsorted(np.cumsum(terms), levels)


@pytest.mark.parametrize(("num_prompts", "num_right"), [(40, 10), (200, 137), (500, 250)])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_of_right_and_wrong_prompts_is_that_of_a_binomial(num_prompts, num_right, confidence):
    values = np.array([1.0] * num_right + [0.0] * (num_prompts - num_right))
    found = bootstrap_mean(values, confidence=confidence, seed=3)
    tail = (1 - confidence) / 2
    low, high = binomial_quantiles(num_prompts, num_right / num_prompts, tail, 1 - tail) / num_prompts
    assert found.value == num_right / num_prompts
    assert found.low == pytest.approx(low, abs=1.5 / num_prompts + 0.002)
    assert found.high == pytest.approx(high, abs=1.5 / num_prompts + 0.002)


def test_the_interval_of_many_prompts_is_that_of_a_normal_mean():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=2000)
    found = bootstrap_mean(values, seed=1)
    half = 1.96 * values.std() / np.sqrt(2000)
    assert found.high - found.value == pytest.approx(half, rel=0.05)
    assert found.value - found.low == pytest.approx(half, rel=0.05)


def test_intervals_repeat_with_their_seed_and_change_with_it():
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)


def test_equal_values_have_no_width_and_none_are_refused():
    found = bootstrap_mean([0.5] * 4)
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least one prompt"):
        bootstrap_mean([])
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        bootstrap_mean([1.0], confidence=95)
