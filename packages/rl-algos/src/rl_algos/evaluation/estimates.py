"""Estimates from samples of prompts, confidence intervals by the bootstrap, and comparison of two models."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

NUM_RESAMPLES = 10_000
"""Resamples of an interval."""

MAX_EXACT = 14
"""Maximum number of differing prompts for which all assignments of signs are enumerated."""

_CHUNK_ROWS = 500
_CHUNK_VALUES = 2_000_000
"""Values that are drawn at a time, which bounds the memory."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval.

    Args:
        value: The mean.
        low, high: Ends of the interval.
    """

    value: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean of values and its percentile bootstrap interval. Prompts are drawn with replacement, all samples
    of a prompt together, because they are not independent of one another.

    If all values are equal the interval has no width, although other prompts may differ.

    Args:
        values: `[prompts]`, one of each prompt.
        confidence: Probability mass of the interval, between 0 and 1.
        seed: Seed of the resamples; equal inputs give equal intervals.

    Raises:
        ValueError: If there are no values, or the confidence is not between 0 and 1.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("a mean needs at least one prompt, got none")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK_VALUES // len(data))
    means = np.empty(NUM_RESAMPLES)
    for first in range(0, NUM_RESAMPLES, rows):
        chosen = generator.integers(len(data), size=(min(rows, NUM_RESAMPLES - first), len(data)))
        means[first : first + rows] = data[chosen].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(data.mean()), float(low), float(high))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes.

    It is `1 - C(n - c, k) / C(n, k)` for c of n samples that pass (arXiv:2107.03374), the mean over all subsets of k
    samples.

    Raises:
        ValueError: Unless `1 <= k <= num_samples` and `0 <= num_passed <= num_samples`.
    """
    _check_k(k, num_samples)
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed must be between 0 and num_samples ({num_samples}), got {num_passed}")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def consensus_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the majority answer among k samples: the mean over all subsets of k samples (cons@k,
    maj@k; arXiv:2203.11171).

    In a subset each sample votes for its answer; two answers are one if their strings are equal. Answers with
    equally many votes share the result: the score is the mean of their scores. A sample without an answer does not
    vote, and a subset without votes scores 0. The score of an answer is the mean over its samples.

    Args:
        answers: The extracted answer of each sample; None or empty if it has none.
        scores: Scores of each sample.
        k: Samples that vote.

    Raises:
        ValueError: Unless `1 <= k <= len(answers)` and there are as many scores as answers.
    """
    if len(answers) != len(scores):
        raise ValueError(f"got {len(answers)} answers but {len(scores)} scores; pass one of each per sample")
    _check_k(k, len(answers))
    votes = Counter(answer for answer in answers if answer)
    num_silent = len(answers) - votes.total()
    # The chance that an answer wins depends only on the numbers of samples of this and of the other answers.
    shares = {
        count: _winning_share(count, list((Counter(votes.values()) - Counter([count])).elements()), num_silent, k)
        for count in set(votes.values())
    }
    total = 0.0
    for answer, count in votes.items():
        own = [score for given, score in zip(answers, scores, strict=True) if given == answer]
        total += shares[count] * float(np.mean(own))
    return total


def _winning_share(count: int, others: Sequence[int], num_silent: int, k: int) -> float:
    """Return the expected share that an answer with `count` samples has in the majority of k samples.

    Args:
        count: Number of samples with the answer.
        others: Number of samples of each other answer.
        num_silent: Number of samples without an answer.
        k: Number of samples that vote, drawn from all samples without replacement.
    """
    share = 0.0
    for votes in range(1, min(count, k) + 1):
        num_drawn = k - votes
        # Count the ways to draw from the other samples so that no answer gets more than `votes` votes, by the number of
        # drawn samples and of answers with exactly `votes` votes.
        ways = Counter({(0, 0): 1})
        for size in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (drawn, ties), number in ways.items():
                for taken in range(min(size, votes, num_drawn - drawn) + 1):
                    grown[drawn + taken, ties + (taken == votes)] += number * comb(size, taken)
            ways = grown
        by_ties: Counter[int] = Counter()
        for (drawn, ties), number in ways.items():
            by_ties[ties] += number * comb(num_silent, num_drawn - drawn)
        share += comb(count, votes) * sum(number / (1 + ties) for ties, number in by_ties.items())
    return share / comb(count + sum(others) + num_silent, k)


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples ({num_samples}), got {k}")


@dataclass(frozen=True)
class ModelComparison:
    """The difference between two models on the prompts that both answered.

    Args:
        num_prompts: Number of prompts that both answered.
        num_only_first, num_only_second: Numbers of prompts that only one of them answered; they do not count.
        first, second: Mean score of each model over the common prompts.
        difference: Difference of the means, second minus first, with a paired bootstrap interval.
        p_value: Result of the paired permutation test: the probability of a difference at least as large, in either
            direction, if the two models were equally good on each prompt.
        num_better, num_worse: Numbers of prompts with a higher, and with a lower, score of the second model.
        confidence: Confidence level of the interval; 1 minus this is the significance level.
    """

    num_prompts: int
    num_only_first: int
    num_only_second: int
    first: float
    second: float
    difference: Estimate
    p_value: float
    num_better: int
    num_worse: int
    confidence: float

    @property
    def is_significant(self) -> bool:
        """True if the difference is significant at the level `1 - confidence`."""
        return self.p_value < 1 - self.confidence


def compare(
    first: Mapping[str, float], second: Mapping[str, float], *, confidence: float = 0.95, seed: int = 0
) -> ModelComparison:
    """Compare two models by the mean scores of their prompts.

    Args:
        first: Mean score of each prompt for the first model, by prompt id.
        second: Mean score of each prompt for the second model, by prompt id.
        confidence: Confidence level of the interval.
        seed: Seed of the resamples; equal inputs give equal results.

    Raises:
        ValueError: If they have no prompt in common.
    """
    common = [prompt for prompt in first if prompt in second]
    if not common:
        raise ValueError("the two results have no prompt in common")
    ours = np.array([first[prompt] for prompt in common])
    theirs = np.array([second[prompt] for prompt in common])
    differences = theirs - ours
    return ModelComparison(
        num_prompts=len(common),
        num_only_first=len(first) - len(common),
        num_only_second=len(second) - len(common),
        first=float(ours.mean()),
        second=float(theirs.mean()),
        difference=bootstrap_mean(differences, confidence=confidence, seed=seed),
        p_value=permutation_p_value(differences, seed=seed),
        num_better=int((differences > 0).sum()),
        num_worse=int((differences < 0).sum()),
        confidence=confidence,
    )


def permutation_p_value(differences: Sequence[float] | np.ndarray, *, seed: int = 0) -> float:
    """Return the two-sided p-value of a paired permutation test: the share of all assignments of signs to the
    differences whose sum is at least as large as the observed one.

    Up to `MAX_EXACT` differences that are not 0, all assignments are enumerated. Beyond, random ones are drawn, and
    the observed one counts as one of them, so that the p-value is never 0.

    Args:
        differences: `[prompts]`, of paired scores.
        seed: Seed of the random assignments.
    """
    data = np.asarray(differences, dtype=np.float64)
    data = data[data != 0]
    if not data.size:
        return 1.0
    # Sums of equal terms in another order differ in their last bits.
    seen = abs(data.sum()) * (1 - 1e-12) - 1e-12
    if len(data) <= MAX_EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(data))))
        return float((np.abs(signs @ data) >= seen).mean())
    generator = np.random.default_rng(seed)
    num_as_large = 0
    for start in range(0, NUM_RESAMPLES, _CHUNK_ROWS):
        size = (min(_CHUNK_ROWS, NUM_RESAMPLES - start), len(data))
        signs = generator.integers(2, size=size, dtype=np.int8) * 2.0 - 1.0
        num_as_large += int((np.abs(signs @ data) >= seen).sum())
    return (num_as_large + 1) / (NUM_RESAMPLES + 1)
