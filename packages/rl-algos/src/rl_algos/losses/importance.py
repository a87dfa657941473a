"""Correction for what the engine sampled from another distribution than the trainer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_algos.losses.kl import KLType
from rl_algos.losses.sequences import by_sequence
from rl_algos.losses.surrogates import Level
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged

Truncation = Literal["tis", "icepop", "seq-mask-tis"]
Statistic = Literal["sum", "mean", "max"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to plus or minus this before `exp`."""


@dataclass(frozen=True)
class Rejection:
    """Leaves out sequences that the generator sampled too differently.

    With `d = prev - generation` at each sampled token, a sequence is left out of the policy term if the statistic of
    the estimates (k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`, of KL(generation || prev)) is outside [low, high].

    Args:
        statistic: over the tokens of the sequence.
        estimator: per token.
        high, low: bounds; None is unbounded.
    """

    statistic: Statistic = "mean"
    estimator: KLType = "k3"
    high: float | None = None
    low: float | None = None


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights of the policy term, `w = exp(prev - generation)`.

    Args:
        truncation: `tis` bounds weights to [low, high] (Yao et al. 2025, "Your efficient RL framework
            secretly brings you off-policy RL training"); `icepop` drops those outside
            (arXiv:2510.18855); `seq-mask-tis` leaves weights as they are and drops sequences whose geometric mean
            weight is outside.
        low, high: bounds; None is unbounded.
        level: `token` gives each token its own weight, `sequence` all tokens of a sequence the product of theirs,
            which is the exact weight of the sequence, with more variance.
        rejection: sequences to drop besides.
        batch_normalize: whether to divide by the weights in place of the count: by `sum_i sum_t w` in place of the
            number of tokens, by `sum_i mean_t w` in place of the number of sequences, over the whole minibatch
            (self-normalised importance sampling). Weights then count as relative to one another.
    """

    truncation: Truncation = "tis"
    low: float | None = None
    high: float | None = None
    level: Level = "token"
    rejection: Rejection | None = None
    batch_normalize: bool = False

    @property
    def is_by_sequence(self) -> bool:
        """Whether the weight of a token depends on other tokens of its sequence."""
        return self.level == "sequence" or self.truncation == "seq-mask-tis" or self.rejection is not None


def importance_weights(correction: ImportanceCorrection, batch: Batch) -> Ragged:
    """float64 `[tokens]`, the weights of `rl_algos.torch.importance`, 0 off the loss mask; a row per sequence.

    Args:
        batch: with `loss_mask`, `prev_logprobs` and `generation_logprobs`.
    """
    mask = by_sequence(batch, batch.ragged("loss_mask"))
    sampled = mask.values > 0
    prev, generation = batch.ragged("prev_logprobs").values, batch.ragged("generation_logprobs").values
    d = np.zeros(len(sampled))
    d[sampled] = prev[sampled].astype(np.float64) - generation[sampled]
    rows = [d[start:end][sampled[start:end]] for start, end in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]
    low = 0.0 if correction.low is None else correction.low
    high = np.inf if correction.high is None else correction.high
    weights = mask.like(np.zeros(len(sampled)))
    for row, of_row in enumerate(rows):
        if len(of_row):
            weights[row][mask[row] > 0] = _row_weights(correction, of_row, low, high)
    return weights


def _row_weights(correction: ImportanceCorrection, d: np.ndarray, low: float, high: float) -> np.ndarray:
    log_weights = d if correction.level == "token" else np.full(len(d), d.sum())
    weights: np.ndarray = _exp(log_weights)
    if correction.truncation == "tis":
        weights = weights.clip(low, high)
    elif correction.truncation == "icepop":
        weights = np.where((weights >= low) & (weights <= high), weights, 0.0)
    elif not low <= _exp(d.mean()) <= high:
        weights = np.zeros(len(d))
    if correction.rejection is not None and _rejects(correction.rejection, d):
        weights = np.zeros(len(d))
    return weights


def _rejects(rejection: Rejection, d: np.ndarray) -> bool:
    bounded = d.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimate = {"k1": -bounded, "k2": bounded**2 / 2, "k3": np.expm1(bounded) - bounded}[rejection.estimator]
    found = {"sum": estimate.sum(), "mean": estimate.mean(), "max": estimate.max()}[rejection.statistic]
    low = -np.inf if rejection.low is None else rejection.low
    high = np.inf if rejection.high is None else rejection.high
    return not low <= float(found) <= high


def _exp(log_weights: np.ndarray) -> np.ndarray:
    exponentials: np.ndarray = np.exp(np.clip(log_weights, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return exponentials
