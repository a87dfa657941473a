"""The computation behind `rl_algos.losses.policy.PolicyLoss`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.policy import ImportanceCorrection, KLPenalty, PolicyLoss
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute(loss: PolicyLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of the policy loss over one microbatch.

    Args:
        loss: what to compute.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: columns that `loss.columns` names.
    """
    logprobs = reads["logprobs"]
    prev = logprobs.detach() if loss.on_policy else rows["prev_logprobs"]
    generation = rows["generation_logprobs"]
    mask = rows["loss_mask"].to(logprobs.dtype)
    lengths = rows.row_sums(mask).clamp(min=1)

    mismatch = mask * (prev - generation)
    kept = _below_threshold(loss, rows, mismatch, mask, lengths)
    advantages = rows.per_token("advantages").to(logprobs.dtype)
    ratio = _ratio(loss, rows, mask * (logprobs - prev), lengths)
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    per_token = _surrogate(loss, ratio, clipped, logprobs, advantages)
    masked_sequences = len(kept) - kept.sum()
    if loss.importance is not None:
        weight, dropped = _importance_weight(loss.importance, rows, mismatch, lengths)
        per_token = per_token * weight
        masked_sequences = masked_sequences + dropped
    metrics = _mismatch_metrics(mismatch, mask, masked_sequences)
    metrics["policy/ratio"] = MetricSum((mask * ratio.detach()).sum(), "tokens")
    metrics["policy/clipped"] = MetricSum((mask * (ratio.detach() != clipped.detach())).sum(), "tokens")
    metrics["policy/entropy"] = MetricSum(-(mask * logprobs.detach()).sum(), "tokens")
    if loss.kl is not None:
        kl = reference_kl(loss.kl, logprobs, rows["ref_logprobs"])
        per_token = per_token + loss.kl.weight * kl
        metrics["policy/kl"] = MetricSum((mask * kl.detach()).sum(), "tokens")

    per_token = per_token * mask * rows.spread(kept)
    if loss.level == "sequence":
        per_token = per_token / rows.spread(lengths)
    return LossSums({loss.denominator: per_token.sum()}, metrics)


def reference_kl(kl: KLPenalty, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) per token, `[tokens]`."""
    d = _clamp(ref_logprobs - logprobs, kl.input_clamp)
    estimate = {"k1": lambda: -d, "k2": lambda: 0.5 * d.square(), "k3": lambda: torch.expm1(d) - d}[kl.estimator]()
    return _clamp(estimate, kl.output_clamp)


def _surrogate(loss: PolicyLoss, ratio: Tensor, clipped: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    if loss.cispo:
        return -advantages * clipped.detach() * logprobs
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    if loss.dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.minimum(surrogate, -advantages * loss.dual_clip), surrogate)


def _ratio(loss: PolicyLoss, rows: Rows, log_ratio: Tensor, lengths: Tensor) -> Tensor:
    if loss.sequence_ratio:
        log_ratio = rows.spread(rows.row_sums(log_ratio) / lengths)
    return log_ratio.exp()


def _importance_weight(
    correction: ImportanceCorrection, rows: Rows, mismatch: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights `[tokens]` and the number of sequences dropped."""
    weight = mismatch.exp()
    low = 0.0 if correction.low is None else correction.low
    high = torch.inf if correction.high is None else correction.high
    dropped = torch.zeros((), dtype=weight.dtype, device=weight.device)
    if correction.truncation == "tis":
        return weight.clamp(max=high), dropped
    if correction.truncation == "icepop":
        return torch.where((weight >= low) & (weight <= high), weight, 0.0), dropped
    mean = (rows.row_sums(mismatch) / lengths).exp()
    inside = ((mean >= low) & (mean <= high)).to(weight.dtype)
    return weight * rows.spread(inside), (1 - inside).sum()


def _below_threshold(loss: PolicyLoss, rows: Rows, mismatch: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """1.0 for each sequence that trains, `[rows]`."""
    if loss.mismatch_threshold is None:
        return torch.ones(len(rows), dtype=mismatch.dtype, device=mismatch.device)
    error = rows.row_sums(mask * mismatch.abs().exp()) / lengths
    return (error <= loss.mismatch_threshold).to(mismatch.dtype)


def _mismatch_metrics(mismatch: Tensor, mask: Tensor, masked_sequences: Tensor) -> dict[str, MetricSum]:
    """How far trainer and generator disagree on the sampled tokens; `mismatch` is prev - generation, 0 off the mask."""
    size = mismatch.abs()
    largest = size.max() if len(size) else size.sum()
    return {
        "mismatch/mean": MetricSum((mask * size.exp()).sum(), "tokens"),
        "mismatch/kl": MetricSum((mask * (torch.expm1(mismatch) - mismatch)).sum(), "tokens"),
        "mismatch/max": MetricSum(largest, reduction="max"),
        "mismatch/masked_sequences": MetricSum(masked_sequences, reduction="sum"),
    }


def _clamp(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
