"""The loss on spans against its formula, one span at a time."""

import math

import numpy as np
import pytest
import torch

from rl_algos.losses.distillation import SpanLoss
from rl_algos.torch.distillation import compute_spans as compute
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.loss import Rows

OFFSETS = np.array([0, 5, 6, 11])
MARKS = np.array([0, 1, 2, 2, 0, 0, 0, 2, 1, 1, 2], np.uint8)
SPANS = [(1, 3), (3, 4), (7, 8), (8, 11)]


def columns(seed=0):
    random = np.random.default_rng(seed)
    student = -random.exponential(size=len(MARKS))
    teacher = np.where(MARKS == 2, -random.exponential(size=len(MARKS)), 0.0)
    return student, teacher


def oracle(student, teacher, tau):
    total = 0.0
    for first, last in SPANS:
        p, q = math.exp(teacher[last - 1] / tau), math.exp(sum(student[first:last]) / tau)
        total += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return total / len(SPANS)


def value_of(loss, student, teacher):
    rows = Rows(torch.tensor(OFFSETS), {"spans": torch.tensor(MARKS), "span_logprobs": torch.tensor(teacher)})
    totals = loss.totals(Batch({"spans": Ragged(MARKS, OFFSETS)}))
    return compute(loss, {"logprobs": student}, rows).loss(totals)


@pytest.mark.parametrize("tau", [1.0, 10.0])
def test_the_loss_is_the_divergence_of_two_outcomes_of_each_span(tau):
    student, teacher = columns()
    logprobs = torch.tensor(student, requires_grad=True)
    value = value_of(SpanLoss(tau), logprobs, teacher)
    assert value.item() == pytest.approx(oracle(student, teacher, tau), rel=1e-9)
    value.backward()
    expected, h = np.zeros(len(student)), 1e-6
    for place in range(len(student)):
        nudge = np.zeros(len(student))
        nudge[place] = h
        up, down = (oracle(student + sign * nudge, teacher, tau) for sign in (1, -1))
        expected[place] = (up - down) / (2 * h)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_extremes_and_what_lies_off_the_spans_stay_finite(seed):
    random = np.random.default_rng(seed)
    student = np.where(MARKS > 0, -random.choice([0.0, 1e-9, 1.0, 200.0], len(MARKS)), np.nan).astype(np.float32)
    teacher = np.where(MARKS == 2, -random.choice([0.0, 1e-9, 1.0, 200.0], len(MARKS)), np.nan).astype(np.float32)
    logprobs = torch.tensor(student, requires_grad=True)
    value = value_of(SpanLoss(1.0), logprobs, teacher)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logprobs.grad).all()


def test_a_student_as_likely_as_the_teacher_has_nothing_to_learn():
    student, _ = columns(1)
    teacher = np.zeros(len(MARKS))
    for first, last in SPANS:
        teacher[last - 1] = student[first:last].sum()
    logprobs = torch.tensor(student, requires_grad=True)
    value = value_of(SpanLoss(), logprobs, teacher)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert logprobs.grad.abs().max() < 1e-12
