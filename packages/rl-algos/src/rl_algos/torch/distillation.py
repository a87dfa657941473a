"""The computation behind `rl_algos.losses.distillation`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.distillation import (
    FORWARD_KL,
    LEAST_TAIL,
    NLL,
    REVERSE_KL,
    STUDENT_TAIL,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_TAIL,
    DistillationLoss,
    Divergence,
)
from rl_core.torch.loss import LossSums, MetricSum, Rows

NOTHING = -1e4
"""Log of no mass: finite, so that 0 times it is 0, and its exponential is 0."""


def compute(loss: DistillationLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of the distillation loss over one microbatch.

    Args:
        reads: `logprobs_at` float32 `[tokens, k]` at the teacher's tokens, with gradient, and `logprobs` `[tokens]`
            likewise if the loss learns the text as well.
        rows: columns that `loss.columns` names.
    """
    mask = rows["loss_mask"] > 0
    counts = mask[:, None] & (rows[TEACHER_IDS] >= 0)
    student = log_masses(reads["logprobs_at"], counts)
    teacher = log_masses(rows[TEACHER_LOGPROBS].to(student.dtype), counts)
    objective = divergence(loss.divergence, teacher, student).sum()
    with torch.no_grad():
        metrics = {
            FORWARD_KL: kl(teacher, student).sum(),
            REVERSE_KL: kl(student, teacher).sum(),
            TEACHER_TAIL: torch.where(mask, teacher[:, -1].exp(), 0.0).sum(),
            STUDENT_TAIL: torch.where(mask, student[:, -1].exp(), 0.0).sum(),
        }
    if loss.nll_weight:
        nll = -torch.where(mask, reads["logprobs"], 0.0).sum()
        metrics[NLL] = nll.detach()
        objective = objective + loss.nll_weight * nll
    return LossSums({"tokens": objective}, {name: MetricSum(value, "tokens") for name, value in metrics.items()})


def log_masses(logprobs: Tensor, counts: Tensor) -> Tensor:
    """`[tokens, k + 1]`: logs of the masses of k tokens, and of the tail that holds all others.

    Args:
        logprobs: `[tokens, k]`; anything at all if `counts`, bool `[tokens, k]`, is False.
    """
    kept = torch.where(counts, logprobs, NOTHING).clamp(min=NOTHING)
    # a sum that rounds to 1 or above it leaves the least tail, which has no gradient
    log_sum = kept.logsumexp(1, keepdim=True).clamp(max=math.log1p(-LEAST_TAIL))
    return torch.cat([kept, torch.log(-torch.expm1(log_sum))], dim=1)


def divergence(kind: Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """`[tokens]`, from the logs of masses `[tokens, k + 1]` of both."""
    if kind.name == "forward":
        return kl(teacher, student)
    if kind.name == "reverse":
        return kl(student, teacher)
    if kind.name == "mixed":
        return kind.mixed_weight * kl(teacher, student) + (1 - kind.mixed_weight) * kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(kind.beta), student + math.log1p(-kind.beta))
    return kind.beta * kl(teacher, mixture) + (1 - kind.beta) * kl(student, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """`[tokens]`, KL(p || q) from logs of masses `[tokens, outcomes]`."""
    return (p.exp() * (p - q)).sum(1)
