"""The sampled tokens of a microbatch, as the parts of a policy loss see them, and their divergences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rl_algos.losses.importance import LOG_RATIO_BOUND
from rl_algos.losses.mask import DEMONSTRATION
from rl_algos.losses.terms import KLPenalty, KLType
from rl_core.data.microbatch import PAIR
from rl_core.torch.loss import Rows


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios to the bounds that keep their exponential and its gradient finite in float32."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def by_sequence(rows: Rows) -> Rows:
    """Return the same tokens with a row per sequence: neighbouring rows of equal `pair` are joined."""
    if PAIR not in rows:
        return rows
    begins = torch.cat([rows[PAIR].new_ones(1, dtype=torch.bool), rows[PAIR].diff() != 0])
    return replace(rows, offsets=torch.cat([rows.offsets[:-1][begins], rows.offsets[-1:]]))


@dataclass(frozen=True)
class Sampled:
    """Columns at the sampled tokens and 0 at all others, because NaN times 0 would be NaN.

    Args:
        rows: Rows of the microbatch, with the rows of a sequence joined; do not read row columns from them.
        mask: bool `[tokens]`, the tokens that the policy sampled.
        logprobs: `[tokens]`, with gradient.
        prev: `[tokens]`, logprobs before the step.
        generation: `[tokens]`, logprobs by the engine.
        advantages: `[tokens]`.
    """

    rows: Rows
    mask: Tensor
    logprobs: Tensor
    prev: Tensor
    generation: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, rows: Rows, *, on_policy: bool, has_demonstrations: bool = False) -> Sampled:
        """Select from the logprobs of the pass and the columns; `on_policy` takes the logprobs themselves as `prev`,
        and `has_demonstrations` leaves their rows out."""
        mask = rows["loss_mask"] > 0
        if has_demonstrations:
            mask = mask & (rows.per_token(DEMONSTRATION) == 0)
        selected = torch.where(mask, logprobs, 0.0)
        return cls(
            rows=by_sequence(rows),
            mask=mask,
            logprobs=selected,
            prev=selected.detach() if on_policy else torch.where(mask, rows["prev_logprobs"], 0.0),
            generation=torch.where(mask, rows["generation_logprobs"], 0.0),
            advantages=torch.where(mask, rows.per_token("advantages").to(logprobs.dtype), 0.0),
        )

    @cached_property
    def lengths(self) -> Tensor:
        """`[rows]`, sampled tokens of each row; 1 for a row without any."""
        return self.rows.row_sums(self.mask.to(self.logprobs.dtype)).clamp(min=1)

    @cached_property
    def mismatch(self) -> Tensor:
        """`[tokens]`, `prev - generation`."""
        return self.prev - self.generation

    @property
    def ratio(self) -> Tensor:
        """`[tokens]`, `exp(logp - prev)`."""
        return bounded(self.logprobs - self.prev).exp()

    @property
    def behavior_ratio(self) -> Tensor:
        """`[tokens]`, `exp(logp - generation)`."""
        return bounded(self.logprobs - self.generation).exp()

    @classmethod
    def shown(cls, logprobs: Tensor, rows: Rows) -> Sampled:
        """Select the tokens of demonstrations, which the policy did not sample: there are no logprobs before."""
        mask = (rows["loss_mask"] > 0) & (rows.per_token(DEMONSTRATION) > 0)
        selected, advantages = torch.where(mask, logprobs, 0.0), rows.per_token("advantages").to(logprobs.dtype)
        nothing = torch.zeros_like(selected)
        return cls(by_sequence(rows), mask, selected, nothing, nothing, torch.where(mask, advantages, 0.0))

    def select(self, values: Tensor) -> Tensor:
        """Return `[tokens]`, the values at sampled tokens and 0 at all others."""
        return torch.where(self.mask, values, 0.0)

    def row_sums(self, values: Tensor) -> Tensor:
        """Return `[rows]`, the sum over each row's sampled tokens."""
        return self.rows.row_sums(self.select(values))

    def row_means(self, values: Tensor) -> Tensor:
        """Return `[rows]`, the mean over each row's sampled tokens; 0 for a row without any."""
        return self.row_sums(values) / self.lengths


def observed(rows: Rows, mask: Tensor) -> Tensor:
    """Return bool `[tokens]`, the tokens that `rl_algos.losses.mask.num_observed` counts, from the sampled ones."""
    counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    begins, ends = (rows.spread(counts[each]) for each in (rows.offsets[:-1], rows.offsets[1:]))
    return ~mask & (counts[1:] > begins) & (counts[1:] < ends)


def estimate(estimator: KLType, d: Tensor) -> Tensor:
    """Return k1, k2 or k3 of the log-ratios `d`; always finite."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    within = bounded(d)
    return torch.expm1(within) - within


def reference_kl(kl: KLPenalty, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per token, `[tokens]`."""
    d = _clamp(ref_logprobs - logprobs, kl.input_clamp)
    return _clamp(estimate(kl.estimator, d), kl.output_clamp)


def weighed(kl: KLPenalty, values: Tensor, sampled: Sampled) -> Tensor:
    """Return estimates `[tokens]` with the factor that `unbiased` and `from_generation` ask for."""
    if not (kl.unbiased or kl.from_generation):
        return values
    ratio = bounded(sampled.logprobs - (sampled.generation if kl.from_generation else sampled.prev)).exp()
    return values * (ratio if kl.unbiased else ratio.detach())


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
