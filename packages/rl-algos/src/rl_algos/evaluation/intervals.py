"""Confidence intervals of a mean over prompts, by the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
"""Resamples of an interval."""

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


def bootstrap_mean(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, seed: int = 0, resamples: int = NUM_RESAMPLES
) -> Estimate:
    """The mean of values and its percentile bootstrap interval: prompts are drawn with replacement, all samples of a
    prompt together, because they are not independent of one another.

    If all values are equal the interval has no width, which says nothing about other prompts.

    Args:
        values: `[prompts]`, one of each prompt.
        confidence: Probability mass of the interval, between 0 and 1.
        seed: Seed of the resamples; equal inputs give equal intervals.
        resamples: Number of resamples.

    Raises:
        ValueError: If there are no values, or the confidence is not between 0 and 1.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        raise ValueError("a mean needs at least one prompt, got none")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    means = resampled_means(data, seed=seed, resamples=resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(data.mean()), float(low), float(high))


def resampled_means(values: np.ndarray, *, seed: int, resamples: int) -> np.ndarray:
    """float64 `[resamples]`, means of values drawn with replacement.

    Args:
        values: float64 `[prompts]`.
        seed: Seed of the draws.
        resamples: Number of means.
    """
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK_VALUES // len(values))
    found = [
        values[generator.integers(len(values), size=(min(rows, resamples - first), len(values)))].mean(axis=1)
        for first in range(0, resamples, rows)
    ]
    return np.concatenate(found)
