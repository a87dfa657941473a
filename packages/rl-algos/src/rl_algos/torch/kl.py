"""The computation of `rl_algos.losses.kl`."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_algos.losses.kl import KLPenalty, KLType
from rl_algos.torch.sampled import Sampled, bounded


def estimate(estimator: KLType, d: Tensor) -> Tensor:
    """k1, k2 or k3 of the log-ratios `d`; finite whatever they are."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    within = bounded(d)
    return torch.expm1(within) - within


def reference_kl(kl: KLPenalty, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) per token, `[tokens]`."""
    d = _clamp(ref_logprobs - logprobs, kl.input_clamp)
    return _clamp(estimate(kl.estimator, d), kl.output_clamp)


def weighed(kl: KLPenalty, values: Tensor, sampled: Sampled) -> Tensor:
    """Estimates `[tokens]` with the factor that `unbiased` and `from_generation` ask for."""
    if not (kl.unbiased or kl.from_generation):
        return values
    ratio = bounded(sampled.logprobs - (sampled.generation if kl.from_generation else sampled.prev)).exp()
    return values * (ratio if kl.unbiased else ratio.detach())


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
