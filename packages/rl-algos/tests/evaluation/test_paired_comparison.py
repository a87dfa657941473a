from math import comb

import numpy as np
import pytest

from rl_algos.evaluation.estimates import MAX_EXACT, compare, permutation_p_value


def sign_test(num_better, num_worse):
    """Two-sided p-value of the sign test, from the binomial distribution."""
    total = num_better + num_worse
    margin = abs(num_better - num_worse)
    return sum(comb(total, i) for i in range(total + 1) if abs(2 * i - total) >= margin) / 2**total


@pytest.mark.parametrize(("num_better", "num_worse"), [(5, 0), (7, 2), (4, 4), (10, 3)])
def test_the_exact_test_of_equal_steps_is_the_sign_test(num_better, num_worse):
    differences = [1.0] * num_better + [-1.0] * num_worse + [0.0] * 5
    expected = sign_test(num_better, num_worse)
    assert permutation_p_value(differences) == pytest.approx(expected)


def test_the_exact_test_counts_the_signs_of_dyadic_differences():
    # sums of powers of two are all different: only assignments above the one seen are at least as large
    differences = [1.0, 2.0, 4.0, -8.0, 16.0]
    larger = sum(abs(2 * i - 31) >= 15 for i in range(32))
    assert permutation_p_value(differences) == larger / 2**5


def test_the_sampled_test_agrees_with_the_sign_test():
    num_better, num_worse = 60, 40
    assert num_better + num_worse > MAX_EXACT
    found = permutation_p_value([1.0] * num_better + [-1.0] * num_worse, seed=1)
    expected = sign_test(num_better, num_worse)
    assert found == pytest.approx(expected, abs=4 * np.sqrt(expected / 10_000))


def test_a_result_does_not_differ_from_itself():
    scores = {f"p{i}": float(i % 2) for i in range(100)}
    found = compare(scores, scores)
    assert (found.p_value, found.difference.value, found.difference.low, found.difference.high) == (1, 0, 0, 0)
    assert not found.is_significant


def test_the_difference_is_that_of_the_common_prompts():
    first = {"a": 0.0, "b": 0.5, "c": 1.0, "only first": 1.0}
    second = {"only second": 0.0, "c": 0.5, "b": 1.0, "a": 1.0}
    found = compare(first, second)
    assert (found.num_prompts, found.num_only_first, found.num_only_second) == (3, 1, 1)
    assert (found.first, found.second) == (0.5, pytest.approx(2.5 / 3))
    assert found.difference.value == pytest.approx(1 / 3)
    assert (found.num_better, found.num_worse) == (2, 1)
    # of the 8 signs of (1, 0.5, -0.5), six sums are at least 1 in size
    assert found.p_value == 6 / 8


def test_many_prompts_that_improve_are_significant():
    generator = np.random.default_rng(0)
    first = {f"p{i}": float(generator.random() < 0.4) for i in range(500)}
    second = {f"p{i}": float(generator.random() < 0.7) for i in range(500)}
    found = compare(first, second)
    assert found.is_significant
    assert found.difference.low > 0
    paired = np.array([second[p] - first[p] for p in first])
    half = 1.96 * paired.std() / np.sqrt(500)
    assert found.difference.high - found.difference.low == pytest.approx(2 * half, rel=0.05)


def test_results_without_a_common_prompt_are_refused():
    with pytest.raises(ValueError, match="no prompt in common"):
        compare({"a": 1.0}, {"b": 1.0})
