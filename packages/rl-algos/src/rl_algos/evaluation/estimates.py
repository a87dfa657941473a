"""Estimates from several samples of one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples passes: `1 - C(n - c, k) / C(n, k)`
    for c of n samples that pass (arXiv:2107.03374). It is the mean over all subsets of k samples.

    Raises:
        ValueError: Unless `1 <= k <= num_samples` and `0 <= num_passed <= num_samples`.
    """
    _check_k(k, num_samples)
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed must be between 0 and num_samples ({num_samples}), got {num_passed}")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def consensus_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The expected score of the majority answer among k samples: the mean over all subsets of k samples (cons@k,
    maj@k; arXiv:2203.11171).

    In a subset each sample votes for its answer; two answers are one if their texts are equal. Answers with equally
    many votes share the result: the score is the mean of theirs. A sample without an answer does not vote, and a subset
    without votes scores 0. The score of an answer is the mean over its samples.

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
    # how likely an answer wins depends only on its own number of samples and on those of the others
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
    """Expected share that an answer with `count` samples has in the majority of k samples.

    Args:
        count: Number of samples with the answer.
        others: Number of samples of each other answer.
        num_silent: Number of samples without an answer.
        k: Number of samples that vote, drawn from all samples without replacement.
    """
    share = 0.0
    for votes in range(1, min(count, k) + 1):
        ways = _ways(votes, others, num_silent, k - votes)
        share += comb(count, votes) * sum(number / (1 + ties) for ties, number in ways.items())
    return share / comb(count + sum(others) + num_silent, k)


def _ways(votes: int, others: Sequence[int], num_silent: int, num_drawn: int) -> dict[int, int]:
    """Number of ways to draw from the other samples so that no answer gets more than `votes` votes, by the number of
    answers that get exactly as many."""
    found = {(0, 0): 1}  # by samples drawn and ties
    for size in others:
        grown: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), number in found.items():
            for taken in range(min(size, votes, num_drawn - drawn) + 1):
                grown[drawn + taken, ties + (taken == votes)] += number * comb(size, taken)
        found = dict(grown)
    result: Counter[int] = Counter()
    for (drawn, ties), number in found.items():
        result[ties] += number * comb(num_silent, num_drawn - drawn)
    return dict(result)


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples ({num_samples}), got {k}")
