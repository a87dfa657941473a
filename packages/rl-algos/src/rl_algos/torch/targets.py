"""The computations of `rl_algos.losses.targets`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses import targets as described
from rl_algos.torch.sampled import Sampled
from rl_algos.torch.surrogates import COMPUTATIONS
from rl_core.model import UNDIVIDED
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute_nll(_loss: described.TargetNLLLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the weighted sum of the negative log-likelihood of the targets over one microbatch.

    Args:
        reads: `logprobs_at` float32 `[tokens, k]`, with gradient.
        rows: Columns of the loss.
    """
    weights = rows[described.WEIGHTS]
    # Logprobs without a weight may be infinite, so they are selected rather than multiplied.
    return _summed(-torch.where(weights != 0, weights * reads["logprobs_at"], 0.0).sum())


def compute_policy(loss: described.TargetPolicyLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the sum of a policy objective over the targets of one microbatch.

    Args:
        loss: Loss with its objective.
        reads: `logprobs_at` float32 `[tokens, 1]`, with gradient.
        rows: Columns of the loss.
    """
    logprobs, sampling, advantages, is_target = _targets(reads, rows)
    log_ratio = logprobs - sampling
    if loss.objective == "dro":
        return _summed((loss.beta / 2 * log_ratio.square() - logprobs * advantages).sum())
    if loss.objective == "gspo":
        counts = ((rows[described.RATIO_MASK] != 0) & is_target).to(logprobs.dtype)
        means = rows.row_sums(log_ratio.detach() * counts) / rows.row_sums(counts).clamp(min=1)
        log_ratio = rows.spread(means) + logprobs - logprobs.detach()
    # Where nothing is learned a ratio may overflow, and 0 times infinity has no gradient.
    ratio = torch.where(advantages != 0, log_ratio, 0.0).exp()
    if loss.objective == "importance_sampling":
        return _summed(-(ratio * advantages).sum())
    clipped = torch.clamp(ratio, rows[described.CLIP_LOW], rows[described.CLIP_HIGH])
    if loss.objective == "cispo":
        return _summed(-(clipped.detach() * logprobs * advantages).sum())
    return _summed(-torch.minimum(ratio * advantages, clipped * advantages).sum())


def compute_surrogate(loss: described.TargetSurrogateLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the sum of a surrogate over the targets of one microbatch.

    Args:
        loss: Loss with its surrogate.
        reads: `logprobs_at` float32 `[tokens, 1]`, with gradient.
        rows: Columns of the loss.
    """
    logprobs, sampling, advantages, is_target = _targets(reads, rows)
    mask = (rows["loss_mask"] > 0) & is_target
    selected = (torch.where(mask, values, 0.0) for values in (logprobs, sampling, sampling, advantages))
    sampled = Sampled(rows, mask, *selected)
    return _summed(sampled.select(COMPUTATIONS[type(loss.surrogate)](loss.surrogate, sampled).loss).sum())


def _targets(reads: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `[tokens]` each: logprobs, logprobs when sampled and advantages, 0 where there is no target, and a mask of
    the targets."""
    is_target = rows[described.TARGETS][:, 0] >= 0
    logprobs = reads["logprobs_at"][:, 0]
    columns = (rows[name].to(logprobs.dtype) for name in (described.SAMPLING_LOGPROBS, described.ADVANTAGES))
    logprobs, sampling, advantages = (torch.where(is_target, values, 0.0) for values in (logprobs, *columns))
    return logprobs, sampling, advantages, is_target


def _summed(value: Tensor) -> LossSums:
    return LossSums({UNDIVIDED: value}, {described.LOSS_SUM: MetricSum(value.detach(), reduction="sum")})
