"""Correction for tokens that the engine sampled from another distribution than the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from rl_algos.losses.mask import by_sequence
from rl_algos.losses.surrogates import Level
from rl_algos.losses.terms import CheckedConfig, KLType
from rl_core.config import Problem
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged

Truncation = Literal["tis", "icepop", "seq-mask-tis"]
Statistic = Literal["sum", "mean", "max"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to plus or minus this before `exp`."""


class Rejection(CheckedConfig):
    """Leaves out sequences that the generator sampled too differently.

    With `d = prev - generation` at each sampled token, a sequence is left out of the policy term if the statistic of
    the estimates (k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`, of KL(generation || prev)) is outside [low, high].
    """

    statistic: Statistic = "mean"
    """Statistic over the sampled tokens of a sequence."""
    estimator: KLType = "k3"
    """Estimator of the KL divergence per token, with `d = prev - generation`: k1 `-d`, k2 `d^2 / 2`, k3
    `exp(d) - d - 1`."""
    high: float | None = None
    """Maximum of the statistic; sequences above it are excluded from the policy term. If unset, there is no maximum."""
    low: float | None = None
    """Minimum of the statistic; sequences below it are excluded too. If unset, there is no minimum. Only for k1,
    because k2 and k3 are never negative."""

    def _problems(self) -> Iterator[Problem]:
        if self.low is None and self.high is None:
            yield Problem("high", "must be set, because no sequence is left out without a bound")
        elif self.low is not None and self.estimator != "k1":
            reason = f"is for the estimator k1 only; {self.estimator} is never negative, and small values are good"
            yield Problem("low", reason, got=self.low, remedy="Remove this key")
        elif self.low is not None and self.high is not None and self.low > self.high:
            yield Problem("low", f"must not exceed high ({self.high})", got=self.low)


class ImportanceCorrection(CheckedConfig):
    """Weights of the policy term, `w = exp(prev - generation)`."""

    truncation: Truncation = "tis"
    """How weights outside [low, high] are handled: `tis` clips the weight (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"), `icepop` excludes tokens or sequences with a weight outside
    the bounds (arXiv:2510.18855), `seq-mask-tis` does not change weights and excludes sequences whose geometric mean
    weight is outside."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound of the importance weight. If unset, there is no lower bound."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound of the importance weight. If unset, there is no upper bound, which only `tis` allows."""
    level: Level | None = None
    """Level of the weights: `token` gives each token its own weight, `sequence` gives all tokens of a sequence the
    product of their weights, which is exact and has more variance. If unset, it is the level of the surrogate's ratio:
    `sequence` for `gspo`, `gmpo`, `vespo` and `topr`, `token` otherwise."""
    batch_normalize: bool = False
    """Divide the policy term by the sum of the weights instead of the number of tokens or sequences (self-normalised
    importance sampling): over the whole minibatch, `sum_i sum_t w` replaces the number of tokens and `sum_i mean_t w`
    replaces the number of sequences."""
    rejection: Rejection | None = None
    """Sequences to exclude in addition; null excludes none."""

    @property
    def is_by_sequence(self) -> bool:
        """True if the weight of a token depends on other tokens of its sequence."""
        return self.level == "sequence" or self.truncation == "seq-mask-tis" or self.rejection is not None

    def at_level(self, level: Level) -> ImportanceCorrection:
        """Return the correction with this level if it has none."""
        return self if self.level is not None else self.model_copy(update={"level": level})

    def _problems(self) -> Iterator[Problem]:
        if self.low is not None and self.high is not None and self.low > self.high:
            yield Problem("low", f"must not exceed high ({self.high}), because no weight would be kept", got=self.low)
        if self.truncation != "tis" and self.high is None:
            yield Problem("high", f"must be set, because {self.truncation} needs an upper bound")


def importance_weights(correction: ImportanceCorrection, batch: Batch, *, of_states: bool = False) -> Ragged:
    """Return float64 `[tokens]`, the weights of `rl_algos.torch.policy_loss`, 0 off the loss mask; a row per sequence.

    With `of_states`, they are for a term of a token that depends on the tokens before it and not on the token itself,
    such as the divergence of two distributions. The weight of its own ratio would be 1 in the mean, whatever sampled
    the tokens before. So it has the ratio of the sampled token before it, or at the level `sequence` the product of the
    ratios of all sampled tokens before it, which is exact; both are 1 at the first.

    Args:
        correction: Truncation, bounds and level of the weights, and the sequences to reject.
        batch: Batch with `loss_mask`, `prev_logprobs` and `generation_logprobs`.
        of_states: True for weights of the tokens before each token.
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
            weights[row][mask[row] > 0] = _row_weights(correction, of_row, low, high, of_states)
    return weights


def _row_weights(
    correction: ImportanceCorrection, d: np.ndarray, low: float, high: float, of_states: bool
) -> np.ndarray:
    if of_states:
        before = np.concatenate([[0.0], d[:-1]])
        log_weights = before.cumsum() if correction.level == "sequence" else before
    else:
        log_weights = np.full(len(d), d.sum()) if correction.level == "sequence" else d
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
