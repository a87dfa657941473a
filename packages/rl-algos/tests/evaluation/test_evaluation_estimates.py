import itertools
from collections import Counter

import numpy as np
import pytest

from rl_algos.evaluation.estimates import consensus_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(num_samples):
    for num_passed, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        subsets = list(itertools.combinations([i < num_passed for i in range(num_samples)], k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(np.mean([any(each) for each in subsets]))


def test_hand_computed_pass_at_k():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198))


def majority_score(answers, scores):
    """The score of the majority among given samples, ties shared."""
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
    return np.mean([scores[answer] for answer in leaders])


@pytest.mark.parametrize("seed", range(20))
def test_consensus_is_the_mean_over_all_subsets(seed):
    generator = np.random.default_rng(seed)
    num_samples = int(generator.integers(1, 8))
    scores = {"a": 1.0, "b": 0.0, "c": 0.25, "d": 0.0}
    answers = [("a", "b", "c", "d", None, "")[i] for i in generator.integers(6, size=num_samples)]
    of_samples = [scores.get(answer, 0.0) for answer in answers]
    for k in range(1, num_samples + 1):
        expected = np.mean([majority_score(each, scores) for each in itertools.combinations(answers, k)])
        assert consensus_at_k(answers, of_samples, k) == pytest.approx(expected, abs=1e-12)


def test_hand_computed_consensus():
    assert consensus_at_k(["4", "4", "5"], [1, 1, 0], 3) == 1
    assert consensus_at_k(["4", "5"], [1, 0], 2) == 0.5  # a tie shares the result
    assert consensus_at_k(["4", None, None], [1, 0, 0], 3) == 1  # samples without an answer do not vote
    assert consensus_at_k([None, None], [0, 0], 2) == 0
    # the pairs are 4-4, and 4-5 twice, which are ties
    assert consensus_at_k(["4", "4", "5"], [1, 1, 0], 2) == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_many_samples_with_different_answers_are_quick_to_count():
    answers = [str(i // 2) for i in range(64)]
    scores = [float(answer == "0") for answer in answers]
    assert consensus_at_k(answers, scores, 64) == pytest.approx(1 / 32)
    assert 0 < consensus_at_k(answers, scores, 32) < 1


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=r"samples \(3\)"):
        pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match=r"samples \(3\)"):
        consensus_at_k(["a"] * 3, [1.0] * 3, k)
    with pytest.raises(ValueError, match="2 answers but 1 scores"):
        consensus_at_k(["a", "b"], [1.0], 1)
    with pytest.raises(ValueError, match="num_passed"):
        pass_at_k(3, 4, 1)
