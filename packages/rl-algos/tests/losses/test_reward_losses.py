import math

import numpy as np
import pytest
import torch
from preference_oracle import log_logistic

from rl_algos.losses.preference import BradleyTerryLoss, RegressionLoss
from rl_core.data.batch import Batch
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

NUM_PAIRS = 4
LOSSES = {
    "bradley-terry": BradleyTerryLoss(),
    "subtracted margin": BradleyTerryLoss("subtract"),
    "scaled by the margin": BradleyTerryLoss("scale"),
    "centered": BradleyTerryLoss(center_weight=0.2),
    "regression": RegressionLoss(),
}


def make_batch(seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    index = np.arange(2 * NUM_PAIRS)
    return Batch(
        {
            "scores": scale * random.normal(size=2 * NUM_PAIRS),
            "pair": index % NUM_PAIRS,
            "is_chosen": (index < NUM_PAIRS).astype(np.uint8),
            "margin": np.tile(random.exponential(size=NUM_PAIRS), 2),
            "verdict": random.normal(size=2 * NUM_PAIRS),
        }
    )


def expected(loss, batch):
    scores, targets, margins = (batch.array(name).tolist() for name in ("scores", "verdict", "margin"))
    if isinstance(loss, RegressionLoss):
        return sum((score - target) ** 2 for score, target in zip(scores, targets, strict=True)) / len(scores)
    total = 0.0
    for c, r, m in zip(scores[:NUM_PAIRS], scores[NUM_PAIRS:], margins[:NUM_PAIRS], strict=True):
        difference = c - r - (m if loss.margin == "subtract" else 0.0)
        total -= (m if loss.margin == "scale" else 1.0) * log_logistic(difference)
        total += loss.center_weight * (c + r) ** 2
    return total / NUM_PAIRS


def loss_and_gradient(loss, batch, parts=None):
    compute, totals = resolve(loss.implementation), loss.totals(batch)
    value, gradient = 0.0, np.zeros(len(batch))
    for rows in parts or [range(len(batch))]:
        part = batch.select(list(rows))
        columns = {name: torch.from_numpy(part.array(name)) for name in part}
        scores = columns.pop("scores").requires_grad_()
        share = compute(loss, {"scores": scores}, Rows(torch.arange(len(part) + 1), columns)).loss(totals)
        share.backward()
        value += share.item()
        gradient[list(rows)] = scores.grad.numpy()
    return value, gradient


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_and_its_gradient_that_of_finite_differences(name):
    loss, batch, step = LOSSES[name], make_batch(), 1e-6
    value, gradient = loss_and_gradient(loss, batch)
    assert value == pytest.approx(expected(loss, batch), rel=1e-12)
    for place in range(len(batch)):
        moved = []
        for sign in (1, -1):
            scores = batch.array("scores").copy()
            scores[place] += sign * step
            moved.append(expected(loss, batch.with_columns({"scores": scores})))
        assert gradient[place] == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_of_whole_pairs_change_nothing(name):
    batch = make_batch(1)
    value, gradient = loss_and_gradient(LOSSES[name], batch)
    parts = [[1, 2, NUM_PAIRS + 1, NUM_PAIRS + 2], [0, NUM_PAIRS], [3, NUM_PAIRS + 3]]
    split_value, split_gradient = loss_and_gradient(LOSSES[name], batch, parts)
    assert split_value == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(split_gradient, gradient, rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_scores_leave_everything_finite(name):
    batch = make_batch(2, scale=200.0)
    columns = {name: batch.array(name).astype(np.float32) for name in ("scores", "margin", "verdict")}
    value, gradient = loss_and_gradient(LOSSES[name], batch.with_columns(columns))
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()


def test_equal_scores_have_the_loss_of_no_opinion():
    batch = make_batch().with_columns({"scores": np.zeros(2 * NUM_PAIRS)})
    assert loss_and_gradient(BradleyTerryLoss(), batch)[0] == pytest.approx(math.log(2), rel=1e-12)
