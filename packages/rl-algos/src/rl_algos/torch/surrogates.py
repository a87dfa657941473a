"""The computations of `rl_algos.losses.surrogates`: the policy term of each token, by the surrogate's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_algos.losses import surrogates as described
from rl_algos.losses.importance import LOG_RATIO_BOUND
from rl_algos.torch.sampled import Sampled, bounded


class PolicyTerms(NamedTuple):
    """The policy term of a microbatch.

    Attributes:
        loss: `[tokens]`, with gradient.
        ratio: `[tokens]`, of policy and `prev`, to report.
        clipped: bool `[tokens]`, True if a bound changed the term or took its gradient away.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clip(surrogate: described.Clip, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `Clip`."""
    return _clipped(surrogate, sampled.ratio, sampled.advantages)


def gspo(surrogate: described.GSPO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `GSPO`."""
    mean = sampled.row_means((sampled.logprobs - sampled.prev).detach())
    own = torch.where(
        sampled.rows.spread(mean.abs() < LOG_RATIO_BOUND), sampled.logprobs - sampled.logprobs.detach(), 0.0
    )
    return _clipped(surrogate, (sampled.rows.spread(bounded(mean)) + own).exp(), sampled.advantages)


def cispo(surrogate: described.CISPO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `CISPO`."""
    ratio = sampled.ratio.detach()
    weight = ratio.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high)
    return PolicyTerms(-sampled.advantages * weight * sampled.logprobs, ratio, ratio != weight)


def reinforce(_surrogate: described.Reinforce, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `Reinforce`."""
    return _unclipped(-sampled.advantages * sampled.logprobs, sampled.ratio)


def sapo(surrogate: described.SAPO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `SAPO`."""
    ratio, advantages = sampled.ratio, sampled.advantages
    taus = surrogate.tau_positive, surrogate.tau_negative
    positive, negative = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in taus)
    return _unclipped(-advantages * torch.where(advantages > 0, positive, negative), ratio)


def gmpo(surrogate: described.GMPO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `GMPO`."""
    log_ratio = bounded(sampled.logprobs - sampled.prev)
    clamped = log_ratio.clamp(_log1p(-surrogate.clip_low), _log1p(surrogate.clip_high))
    smaller, larger = torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped)
    kept = torch.where(sampled.advantages > 0, smaller, torch.where(sampled.advantages < 0, larger, log_ratio))
    mean_ratio = sampled.row_means(kept).exp()
    loss = -sampled.rows.spread(sampled.row_means(sampled.advantages) * mean_ratio)
    return PolicyTerms(loss, log_ratio.exp(), log_ratio.detach() != kept.detach())


def dppo_tv(surrogate: described.DPPOTV, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `DPPOTV`."""
    divergence = (sampled.logprobs.detach().exp() - sampled.prev.exp()).abs()
    return _within_region(sampled, divergence <= surrogate.threshold)


def dppo_kl(surrogate: described.DPPOKL, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `DPPOKL`."""
    logprobs, prev = sampled.logprobs.detach(), sampled.prev
    before, others = prev.exp(), -torch.expm1(prev)
    # If p rounds to 1, the smallest number above 0 takes the place of 1 - p in log(1 - p).
    tiny = torch.finfo(prev.dtype).tiny
    log_others = (others.clamp(min=tiny) / (-torch.expm1(logprobs)).clamp(min=tiny)).log()
    divergence = before * (prev - logprobs) + others * log_others
    return _within_region(sampled, divergence <= surrogate.threshold)


def clip_cov(surrogate: described.ClipCov, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `ClipCov`."""
    terms = _clipped(surrogate, sampled.ratio, sampled.advantages)
    chosen = sampled.mask & (sampled.rows["high_covariance"] > 0)
    return PolicyTerms(torch.where(chosen, 0.0, terms.loss), terms.ratio, terms.clipped | chosen)


def kl_cov(surrogate: described.KLCov, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `KLCov`."""
    log_ratio = bounded(sampled.logprobs - sampled.prev)
    ratio = log_ratio.exp()
    chosen = sampled.mask & (sampled.rows["high_covariance"] > 0)
    penalty = torch.where(chosen, surrogate.weight * log_ratio.abs(), 0.0)
    return PolicyTerms(-sampled.advantages * ratio + penalty, ratio, chosen)


def vespo(surrogate: described.VESPO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `VESPO`."""
    log_ratio = sampled.rows.spread(bounded(sampled.row_sums((sampled.logprobs - sampled.prev).detach())))
    settings = ((surrogate.k_positive, surrogate.lambda_positive), (surrogate.k_negative, surrogate.lambda_negative))
    positive, negative = ((rate + k * log_ratio - rate * log_ratio.exp()).exp() for k, rate in settings)
    weight = torch.where(sampled.advantages >= 0, positive, negative)
    return _unclipped(-sampled.advantages * weight * sampled.logprobs, log_ratio.exp())


def topr(_surrogate: described.TOPR, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `TOPR`."""
    ratio = sampled.rows.spread(bounded(sampled.row_sums((sampled.logprobs - sampled.prev).detach()))).exp()
    is_tapered = sampled.advantages < 0
    weight = torch.where(is_tapered, ratio.clamp(max=1), 1.0)
    return PolicyTerms(-sampled.advantages * weight * sampled.logprobs, ratio, is_tapered & (ratio > 1))


def dro(surrogate: described.DRO, sampled: Sampled) -> PolicyTerms:
    """Compute the policy term of `DRO`."""
    distance = surrogate.beta / 2 * bounded(sampled.logprobs - sampled.prev).square()
    return _unclipped(-sampled.advantages * sampled.logprobs + distance, sampled.ratio)


COMPUTATIONS: Mapping[type[described.Surrogate], Callable[[Any, Sampled], PolicyTerms]] = {
    described.Clip: clip,
    described.GSPO: gspo,
    described.CISPO: cispo,
    described.Reinforce: reinforce,
    described.SAPO: sapo,
    described.GMPO: gmpo,
    described.DPPOTV: dppo_tv,
    described.DPPOKL: dppo_kl,
    described.ClipCov: clip_cov,
    described.KLCov: kl_cov,
    described.VESPO: vespo,
    described.TOPR: topr,
    described.DRO: dro,
}
"""Computation of each surrogate. It returns the policy term of each sampled token; values at other tokens are finite
and mean nothing."""


def _clipped(
    surrogate: described.Clip | described.GSPO | described.ClipCov, ratio: Tensor, advantages: Tensor
) -> PolicyTerms:
    clipped = ratio.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    dual_clip = None if isinstance(surrogate, described.ClipCov) else surrogate.dual_clip
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return PolicyTerms(loss, ratio.detach(), ratio.detach() != clipped.detach())


def _log1p(value: float | Tensor) -> Any:
    """Return `log(1 + value)`, at least `-LOG_RATIO_BOUND`, of a number or of a setting that differs by row."""
    if isinstance(value, Tensor):
        return value.log1p().clamp(min=-LOG_RATIO_BOUND)
    return math.log1p(value) if value > -1 else -LOG_RATIO_BOUND


def _unclipped(loss: Tensor, ratio: Tensor) -> PolicyTerms:
    return PolicyTerms(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def _within_region(sampled: Sampled, is_near: Tensor) -> PolicyTerms:
    """Compute `-A r`, left out if the policy is not near and the advantage leads it further away."""
    ratio = sampled.ratio
    leads_away = torch.where(sampled.advantages > 0, ratio > 1, ratio < 1).detach()
    left_out = sampled.mask & ~is_near & leads_away
    return PolicyTerms(torch.where(left_out, 0.0, -sampled.advantages * ratio), ratio.detach(), left_out)
