"""The computations of `rl_algos.losses.distillation`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_algos.losses import distillation as described
from rl_core.torch.loss import LossSums, MetricSum, Rows

CHUNK = 2**22
"""Masses of one chunk. A microbatch with more takes its tokens chunk by chunk, in both passes."""

NOTHING = -1e4
"""Log of no mass: finite, so that 0 times it is 0, and its exponential is 0."""

MIN_OTHER = 1e-6
"""Minimum probability of another text than the span's."""


def compute(loss: described.DistillationLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of the distillation loss over one microbatch.

    Args:
        loss: Loss with its divergence and weights.
        reads: `logprobs_at` float32 `[tokens, k]` at the teacher's tokens, with gradient, and `logprobs` `[tokens]`
            likewise if the loss learns the text as well.
        rows: Columns of `loss.columns`.
    """
    mask = rows["loss_mask"] > 0
    student = reads["logprobs_at"]
    sums = _sums if student.shape[0] * (student.shape[1] + 1) <= CHUNK else _SumsByChunk.apply
    weights = rows[described.STATE_WEIGHTS] if loss.importance is not None else None
    objective, measured = sums(
        student, rows[described.TEACHER_LOGPROBS], rows[described.TEACHER_IDS], mask, weights, loss.divergence
    )
    return _loss_sums(loss, objective, measured, reads, mask)


def compute_whole(loss: described.WholeDistillationLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of the distillation loss over whole vocabularies over one microbatch.

    Args:
        loss: Loss with its divergence and weights.
        reads: `divergences` `[tokens, 6]` with gradient, and `logprobs` `[tokens]` likewise if the loss learns the text
            as well.
        rows: Columns of `loss.columns`.
    """
    mask = rows["loss_mask"] > 0
    found = torch.where(mask[:, None], reads["divergences"], 0.0)
    forward, reverse, _, teacher_tail, student_tail, _ = found.sum(0).unbind()
    measured = torch.stack([forward, reverse, teacher_tail, student_tail]).detach()
    if loss.importance is not None:
        found = found * rows[described.STATE_WEIGHTS][:, None]
    forward, reverse, mixture, *_ = found.sum(0).unbind()
    weight = loss.divergence.mixed_weight
    objective = {
        "forward": forward,
        "reverse": reverse,
        "mixed": weight * forward + (1 - weight) * reverse,
        "jensen_shannon": mixture,
    }[loss.divergence.name]
    sums = _loss_sums(loss, objective, measured, reads, mask)
    error = torch.where(mask, (reads["divergences"][:, 5].detach() - rows[described.TEACHER_TOKEN_LOGPROBS]).abs(), 0.0)
    largest = MetricSum(torch.cat([error, error.new_zeros(1)]).amax(), reduction="max")
    return LossSums(sums.objective, {**sums.metrics, described.HEAD_ERROR: largest})


def _loss_sums(
    loss: described.DistillationLoss | described.WholeDistillationLoss,
    objective: Tensor,
    measured: Tensor,
    reads: Mapping[str, Tensor],
    mask: Tensor,
) -> LossSums:
    metrics = dict(zip(described.METRICS, measured.unbind(), strict=True))
    sums = {loss.denominator: objective}
    if loss.nll_weight:
        nll = -torch.where(mask, reads["logprobs"], 0.0).sum()
        metrics[described.NLL] = nll.detach()
        sums["tokens"] = sums.get("tokens", 0.0) + loss.nll_weight * nll
    return LossSums(sums, {name: MetricSum(value, "tokens") for name, value in metrics.items()})


def _sums(
    student: Tensor, teacher: Tensor, ids: Tensor, mask: Tensor, weights: Tensor | None, kind: described.Divergence
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the divergences of all tokens, and the sums of the `METRICS`, without gradient.

    Args:
        student: Logprobs `[tokens, k]` of the student at the ids.
        teacher: Logprobs `[tokens, k]` of the teacher at the ids.
        ids: `[tokens, k]`, -1 where there are fewer.
        mask: bool `[tokens]`.
        weights: `[tokens]`, factors of the divergences; None for 1.
        kind: Divergence to sum.
    """
    counts = mask[:, None] & (ids >= 0)
    q = log_masses(student, counts)
    p = log_masses(teacher.to(q.dtype), counts)
    found = divergence(kind, p, q)
    total = (found if weights is None else found * weights).sum()
    with torch.no_grad():
        tails = (torch.where(mask, each[:, -1].exp(), 0.0).sum() for each in (p, q))
        measured = torch.stack([kl(p, q).sum(), kl(q, p).sum(), *tails])
    return total, measured


class _SumsByChunk(torch.autograd.Function):
    """Sums of some tokens at a time. The gradient is computed on the way, so the memory of a chunk is free before the
    next one."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        ids: Tensor,
        mask: Tensor,
        weights: Tensor | None,
        kind: described.Divergence,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, CHUNK // (student.shape[1] + 1))
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        total, measured = student.new_zeros(()), student.new_zeros(len(described.METRICS))
        for start in range(0, len(student), size):
            chunk = slice(start, start + size)
            with torch.set_grad_enabled(gradient is not None):
                own = student[chunk].detach().requires_grad_(gradient is not None)
                own_weights = None if weights is None else weights[chunk]
                value, its_measured = _sums(own, teacher[chunk], ids[chunk], mask[chunk], own_weights, kind)
            if gradient is not None:
                (gradient[chunk],) = torch.autograd.grad(value, [own])
            total += value.detach()
            measured += its_measured
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(measured)
        return total, measured

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_total: Tensor, _by_measured: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * by_total, None, None, None, None, None


def log_masses(logprobs: Tensor, counts: Tensor) -> Tensor:
    """Return `[tokens, k + 1]`: logs of the masses of k tokens, and of the tail that holds all others.

    Args:
        logprobs: `[tokens, k]`; any value at tokens that do not count.
        counts: bool `[tokens, k]`, True at tokens that count.
    """
    kept = torch.where(counts, logprobs, NOTHING).clamp(min=NOTHING)
    # A sum that rounds to 1 or above it leaves the smallest tail, which has no gradient.
    log_sum = kept.logsumexp(1, keepdim=True).clamp(max=math.log1p(-described.MIN_TAIL))
    return torch.cat([kept, torch.log(-torch.expm1(log_sum))], dim=1)


def divergence(kind: described.Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """Return `[tokens]`, from the logs of masses `[tokens, k + 1]` of both."""
    if kind.name == "forward":
        return kl(teacher, student)
    if kind.name == "reverse":
        return kl(student, teacher)
    if kind.name == "mixed":
        return kind.mixed_weight * kl(teacher, student) + (1 - kind.mixed_weight) * kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(kind.beta), student + math.log1p(-kind.beta))
    return kind.beta * kl(teacher, mixture) + (1 - kind.beta) * kl(student, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return `[tokens]`, KL(p || q) from logs of masses `[tokens, outcomes]`."""
    return (p.exp() * (p - q)).sum(1)


def compute_spans(loss: described.SpanLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Return sums of the span loss over one microbatch.

    Args:
        loss: Loss with its temperature `tau`.
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: Columns of `loss.columns`.
    """
    is_inside, is_last = rows[described.SPANS] > 0, rows[described.SPANS] == 2
    student = span_sums(reads["logprobs"], is_inside, is_last)
    teacher = rows[described.SPAN_LOGPROBS][is_last].to(student.dtype)
    value = binary_kl(teacher / loss.tau, student / loss.tau).sum()
    metrics = {
        described.LOGPROB_GAP: MetricSum((teacher - student.detach()).abs().sum(), "spans"),
        described.TOKENS_PER_SPAN: MetricSum(is_inside.to(student.dtype).sum(), "spans"),
    }
    return LossSums({"spans": value}, metrics)


def span_sums(values: Tensor, is_inside: Tensor, is_last: Tensor) -> Tensor:
    """Return `[spans]`, the sum of values `[tokens]` over the tokens of each span."""
    span = is_last.cumsum(0) - is_last.long()
    inside = is_inside.nonzero()[:, 0]
    sums = torch.zeros(int(is_last.sum()), dtype=values.dtype, device=values.device)
    return sums.index_add(0, span[inside], values[inside])


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the KL divergence of two outcomes, from logs of the first one's probabilities."""
    most = math.log1p(-MIN_OTHER)
    p, q = p.clamp(max=most), q.clamp(max=most)
    return p.exp() * (p - q) - torch.expm1(p) * (torch.log(-torch.expm1(p)) - torch.log(-torch.expm1(q)))
