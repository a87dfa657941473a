"""The computations of `rl_algos.losses.tokens`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.tokens import DraftLoss, NLLLoss, ValueLoss
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute_nll(_loss: NLLLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the sum of the negative log-likelihood over one microbatch.

    Args:
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: `loss_mask` `[tokens]`.
    """
    # Values off the mask may not be finite, so they are selected rather than multiplied.
    return LossSums({"tokens": -torch.where(rows["loss_mask"] > 0, reads["logprobs"], 0.0).sum()})


def compute_value(loss: ValueLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of the value loss over one microbatch.

    Args:
        loss: Loss with its clip range.
        reads: `values` float32 `[tokens]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    # Values off the mask may not be finite, so they are selected rather than multiplied.
    mask = rows["loss_mask"] > 0
    values = torch.where(mask, reads["values"], 0.0)
    returns = torch.where(mask, rows["returns"].to(values.dtype), 0.0)
    errors = (values - returns).square()
    metrics = {"critic/error": MetricSum(errors.detach().sum(), "tokens")}
    if loss.clip is not None:
        before = torch.where(mask, rows["values"].to(values.dtype), 0.0)
        of_clipped = (torch.clamp(values, before - loss.clip, before + loss.clip) - returns).square()
        metrics["critic/clipped"] = MetricSum((of_clipped > errors).to(values.dtype).sum(), "tokens")
        errors = torch.maximum(errors, of_clipped)
    return LossSums({"tokens": 0.5 * errors.sum()}, metrics)


def compute_drafts(loss: DraftLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the weighted sum of the losses of draft tokens of one microbatch.

    Args:
        loss: Description with the weights.
        reads: `draft_losses` float32 `[tokens, num_tokens]`, with gradient; 0 off the mask.
        rows: Rows of the microbatch.
    """
    losses = reads["draft_losses"]
    return LossSums({"tokens": (losses * losses.new_tensor(loss.weights)).sum()})
