"""The value loss beside its formula, written out in plain Python."""

import numpy as np
import pytest
import torch

from rl_algos.losses.tokens import ValueLoss
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

LENGTHS = (5, 1, 8, 3)


def make_batch(seed=0, *, dtype=np.float64, off_mask=0.0):
    """Values that have moved from those before the step, by little and by more than a clip of 0.2."""
    random = np.random.default_rng(seed)
    mask = Ragged.from_rows([(random.random(n) < 0.6) * (np.arange(n) > 0) for n in LENGTHS], np.uint8)
    sampled = mask.values > 0

    def column(values):
        return mask.like(np.where(sampled, values, off_mask).astype(dtype))

    before = random.normal(size=len(sampled))
    return Batch(
        {
            "tokens": mask.like(np.zeros(len(sampled), np.int32)),
            "loss_mask": mask,
            "values": column(before),
            "returns": column(random.normal(size=len(sampled))),
            "now": column(before + random.normal(0, 0.4, len(sampled))),
        }
    )


def loss_and_gradient(loss, batch, parts):
    """Summed over microbatches."""
    totals, total = loss.totals(batch), 0.0
    gradient = {}
    for rows in parts:
        part = batch.select(rows)
        read = torch.tensor(part.ragged("now").values, requires_grad=True)
        columns = {name: torch.tensor(getattr(part[name], "values", part[name])) for name in part if name != "now"}
        compute = resolve(loss.implementation)
        share = compute(loss, {"values": read}, Rows(torch.tensor(part.ragged("tokens").offsets), columns)).loss(totals)
        share.backward()
        total += share.item()
        ends = np.cumsum(part.ragged("tokens").lengths)[:-1]
        gradient.update(zip(rows, np.split(read.grad.numpy(), ends), strict=True))
    return total, np.concatenate([gradient[row] for row in range(len(batch))])


def oracle(batch, clip, now):
    """The mean over sampled tokens of the larger of both errors, halved."""
    terms = []
    columns = [batch.ragged(name).values for name in ("loss_mask", "values", "returns")]
    for mask, before, target, value in zip(*columns, now, strict=True):
        if mask:
            clipped = value if clip is None else min(max(value, before - clip), before + clip)
            terms.append(max((value - target) ** 2, (clipped - target) ** 2) / 2)
    return sum(terms) / len(terms)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_the_formulas(clip, seed):
    batch = make_batch(seed)
    now = batch.ragged("now").values
    value, gradient = loss_and_gradient(ValueLoss(clip), batch, [[0, 1, 2, 3]])
    assert value == pytest.approx(oracle(batch, clip, now), rel=1e-12)
    step = 1e-6
    for token in range(len(now)):
        above, below = now.copy(), now.copy()
        above[token] += step
        below[token] -= step
        difference = (oracle(batch, clip, above) - oracle(batch, clip, below)) / (2 * step)
        assert gradient[token] == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 1], [0, 2]]])
def test_microbatches_change_nothing(parts):
    batch, loss = make_batch(), ValueLoss(0.2)
    whole = loss_and_gradient(loss, batch, [[0, 1, 2, 3]])
    split = loss_and_gradient(loss, batch, parts)
    assert split[0] == pytest.approx(whole[0], rel=1e-12)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_what_lies_off_the_mask_may_be_infinite_or_nan(clip):
    clean = loss_and_gradient(ValueLoss(clip), make_batch(dtype=np.float32), [[0, 1, 2, 3]])
    for off_mask in (np.nan, np.inf):
        found = loss_and_gradient(ValueLoss(clip), make_batch(dtype=np.float32, off_mask=off_mask), [[0, 1, 2, 3]])
        assert found[0] == clean[0]
        np.testing.assert_array_equal(found[1], clean[1])


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_extreme_values_and_returns_leave_everything_finite(clip, seed):
    random, batch = np.random.default_rng(seed), make_batch(seed, dtype=np.float32)
    on = batch.ragged("loss_mask").values > 0
    columns = {}
    for name in ("now", "values", "returns"):
        values = random.choice([-200.0, -1.0, 0.0, 200.0], len(on))
        values[~on] = random.choice([np.nan, np.inf, -np.inf], int((~on).sum()))
        columns[name] = batch.ragged(name).like(values.astype(np.float32))
    value, gradient = loss_and_gradient(ValueLoss(clip), batch.with_columns(columns), [[0, 1], [2, 3]])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not gradient[~on].any()


def test_it_reports_its_error_and_the_share_of_clipped_tokens():
    batch, loss = make_batch(1), ValueLoss(0.2)
    columns = {name: torch.tensor(getattr(batch[name], "values", batch[name])) for name in batch}
    rows = Rows(torch.tensor(batch.ragged("tokens").offsets), columns)
    metrics = resolve(loss.implementation)(loss, {"values": columns["now"]}, rows).metrics
    sampled = batch.ragged("loss_mask").values > 0
    now, before, target = (batch.ragged(name).values[sampled] for name in ("now", "values", "returns"))
    clipped = (np.clip(now, before - 0.2, before + 0.2) - target) ** 2 > (now - target) ** 2
    assert metrics["critic/clipped"].value.item() == clipped.sum() > 0
    assert metrics["critic/error"].value.item() == pytest.approx(((now - target) ** 2).sum())
