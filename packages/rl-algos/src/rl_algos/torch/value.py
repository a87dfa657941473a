"""The computation of `rl_algos.losses.value.ValueLoss`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.value import ValueLoss
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute(loss: ValueLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of the value loss over one microbatch.

    Args:
        loss: Loss with its clip range.
        reads: `values` float32 `[tokens]`, with gradient.
        rows: Columns that `loss.columns` names.
    """
    # selected rather than multiplied: what lies off the mask may not be finite
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
