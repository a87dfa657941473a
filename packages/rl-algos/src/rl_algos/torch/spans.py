"""The computation of `rl_algos.losses.spans`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.spans import LOGPROB_GAP, SPAN_LOGPROBS, SPANS, TOKENS_PER_SPAN, SpanLoss
from rl_core.torch.loss import LossSums, MetricSum, Rows

LEAST = 1e-6
"""Least probability of another text than the span's."""


def compute(loss: SpanLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of the span loss over one microbatch.

    Args:
        loss: Loss with its temperature `tau`.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: Columns that `loss.columns` names.
    """
    is_inside, is_last = rows[SPANS] > 0, rows[SPANS] == 2
    student = span_sums(reads["logprobs"], is_inside, is_last)
    teacher = rows[SPAN_LOGPROBS][is_last].to(student.dtype)
    value = binary_kl(teacher / loss.tau, student / loss.tau).sum()
    metrics = {
        LOGPROB_GAP: MetricSum((teacher - student.detach()).abs().sum(), "spans"),
        TOKENS_PER_SPAN: MetricSum(is_inside.to(student.dtype).sum(), "spans"),
    }
    return LossSums({"spans": value}, metrics)


def span_sums(values: Tensor, is_inside: Tensor, is_last: Tensor) -> Tensor:
    """`[spans]`, the sum of values `[tokens]` over the tokens of each span."""
    span = is_last.cumsum(0) - is_last.long()
    inside = is_inside.nonzero()[:, 0]
    sums = torch.zeros(int(is_last.sum()), dtype=values.dtype, device=values.device)
    return sums.index_add(0, span[inside], values[inside])


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence of two outcomes, from logs of the first one's probabilities."""
    most = math.log1p(-LEAST)
    p, q = p.clamp(max=most), q.clamp(max=most)
    return p.exp() * (p - q) - torch.expm1(p) * (torch.log(-torch.expm1(p)) - torch.log(-torch.expm1(q)))
