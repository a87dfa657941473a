"""The computations behind `rl_core.selfcheck.losses`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_core.selfcheck.losses import PairLoss, ReturnsLoss, TokenLoss
from rl_core.torch.loss import LossSums, MetricSum, Rows


def token_loss(loss: TokenLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return the sums of a `TokenLoss`."""
    logprobs = reads["logprobs"]
    mask = rows["loss_mask"].to(logprobs.dtype)
    per_token = -rows["weights"].to(logprobs.dtype) * logprobs - loss.entropy_weight * reads["entropy"]
    per_token = per_token - loss.topk_weight * reads["topk_logprobs"][:, 1]
    at = reads["logprobs_at"]
    by_place = torch.arange(1, at.shape[1] + 1, dtype=at.dtype, device=at.device)
    per_token = per_token - loss.candidates_weight * (at * by_place).sum(1)
    per_row = rows.row_sums(logprobs * mask).square()
    metrics = {
        "nll": MetricSum(-(mask * logprobs).sum(), "tokens"),
        "nll_by_count": MetricSum(-(mask * logprobs).sum(), mask.sum()),
        "lowest_logprob": MetricSum(logprobs.min(), reduction="min"),
        "longest_row": MetricSum(rows.offsets.diff().max(), reduction="max"),
        "rows": MetricSum(torch.tensor(float(len(rows))), reduction="sum"),
    }
    return LossSums({"tokens": (per_token * mask).sum(), "sequences": loss.sequence_weight * per_row.sum()}, metrics)


def value_loss(
    loss: ReturnsLoss, reads: Mapping[str, Tensor], rows: Rows
) -> LossSums:  # the signature of implementations
    """Return the sums of a `ReturnsLoss`."""
    values = reads["values"]
    errors = (values - rows["returns"].to(values.dtype)).square() * rows["loss_mask"]
    return LossSums({"tokens": errors.sum()})


def pair_loss(loss: PairLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:  # the signature of implementations
    """Return the sums of a `PairLoss`; fails if a pair is split."""
    scores = reads["scores"]
    pairs, index = rows["pair"].unique(return_inverse=True)
    signs = rows["is_chosen"].to(scores.dtype) * 2 - 1
    differences = scores.new_zeros(len(pairs)).index_add(0, index, signs * scores)
    assert torch.all(index.bincount() == 2), "a pair lies in two microbatches"
    return LossSums({"pairs": -F.logsigmoid(differences).sum()})
