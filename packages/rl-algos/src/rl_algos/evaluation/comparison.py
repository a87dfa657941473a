"""Comparison of two models on the same prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.evaluation.intervals import NUM_RESAMPLES, Estimate, bootstrap_mean

MOST_EXACT = 14
"""Most differing prompts for which all assignments of signs are enumerated."""

_CHUNK_ROWS = 500


@dataclass(frozen=True)
class Comparison:
    """The difference between two models on the prompts that both answered.

    Args:
        num_prompts: Number of prompts that both answered.
        num_only_first, num_only_second: Numbers of prompts that only one of them answered; they do not count.
        first, second: Mean score of each model over the common prompts.
        difference: Difference of the means, second minus first, with a paired bootstrap interval.
        p_value: of the paired permutation test: the probability of a difference at least as large, in either
            direction, if the two models were equally good on each prompt.
        num_better, num_worse: Prompts on which the second model scored more, and less.
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
) -> Comparison:
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
    return Comparison(
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


def permutation_p_value(
    differences: Sequence[float] | np.ndarray, *, seed: int = 0, resamples: int = NUM_RESAMPLES
) -> float:
    """The two-sided p-value of a paired permutation test: the share of all assignments of signs to the differences
    whose sum is at least as large as the one that was seen.

    Up to `MOST_EXACT` differences that are not 0, all assignments are enumerated. Beyond, random ones are drawn, and
    the one that was seen counts as one of them, so that the p-value is never 0.

    Args:
        differences: `[prompts]`, of paired scores.
        seed: Seed of the random assignments.
        resamples: Number of random assignments.
    """
    data = np.asarray(differences, dtype=np.float64)
    data = data[data != 0]
    if not data.size:
        return 1.0
    # sums of equal terms in another order differ in their last bits
    seen = abs(data.sum()) * (1 - 1e-12) - 1e-12
    if len(data) <= MOST_EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(data))))
        return float((np.abs(signs @ data) >= seen).mean())
    generator = np.random.default_rng(seed)
    num_as_large = 0
    for start in range(0, resamples, _CHUNK_ROWS):
        size = (min(_CHUNK_ROWS, resamples - start), len(data))
        signs = generator.integers(2, size=size, dtype=np.int8) * 2.0 - 1.0
        num_as_large += int((np.abs(signs @ data) >= seen).sum())
    return (num_as_large + 1) / (resamples + 1)
