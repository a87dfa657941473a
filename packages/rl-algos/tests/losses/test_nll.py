import numpy as np
import pytest
import torch

from rl_algos.losses.tokens import NLLLoss
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.plugins import resolve
from rl_core.torch.loss import Rows

LENGTHS = [3, 1, 4, 2]


def data(seed=0):
    random = np.random.default_rng(seed)
    total = sum(LENGTHS)
    offsets = np.cumsum([0, *LENGTHS])
    logprobs = -random.exponential(size=total)
    mask = random.integers(2, size=total).astype(np.uint8)
    logprobs[offsets[:-1]] = mask[offsets[:-1]] = 0
    return offsets, logprobs, mask


def test_the_loss_is_the_mean_of_the_tokens_under_the_mask():
    offsets, logprobs, mask = data()
    loss = NLLLoss()
    batch = Batch({"tokens": Ragged(np.zeros(len(mask), np.int32), offsets), "loss_mask": Ragged(mask, offsets)})
    rows = Rows(torch.tensor(offsets), {"loss_mask": torch.tensor(mask)})
    reads = {"logprobs": torch.tensor(logprobs, requires_grad=True)}
    value = resolve(loss.implementation)(loss, reads, rows).loss(loss.totals(batch))
    value.backward()
    assert value.item() == pytest.approx(-logprobs[mask == 1].mean(), rel=1e-12)
    np.testing.assert_allclose(reads["logprobs"].grad.numpy(), mask * (-1.0 / mask.sum()))


def test_the_gradient_is_that_of_finite_differences_and_extremes_leave_it_finite():
    offsets, logprobs, mask = data(2)
    rows = Rows(torch.tensor(offsets), {"loss_mask": torch.tensor(mask)})

    def value(logprobs):
        return resolve(NLLLoss().implementation)(NLLLoss(), {"logprobs": logprobs}, rows).loss({"tokens": mask.sum()})

    read, step = torch.tensor(logprobs, requires_grad=True), 1e-6
    value(read).backward()
    for token in range(len(mask)):
        nudge = np.zeros(len(mask))
        nudge[token] = step
        up, down = (value(torch.tensor(logprobs + sign * nudge)).item() for sign in (1, -1))
        assert read.grad[token].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)
    for wild in (np.nan, np.inf, -np.inf):
        extreme = np.where(mask > 0, np.resize([-200.0, 0.0], len(mask)), wild).astype(np.float32)
        read = torch.tensor(extreme, requires_grad=True)
        found = value(read)
        found.backward()
        assert found.item() == pytest.approx(-extreme[mask > 0].mean())
        assert torch.isfinite(read.grad).all()
        assert not read.grad[torch.tensor(mask) == 0].any()


def test_shards_divided_by_the_global_total_add_up():
    offsets, logprobs, mask = data(1)
    loss, compute = NLLLoss(), resolve(NLLLoss().implementation)
    batch = Batch({"loss_mask": Ragged(mask, offsets)})
    parts = batch.split([1, 3])
    assert loss.totals(batch)["tokens"] == sum(loss.totals(part)["tokens"] for part in parts) == mask.sum()
    whole = 0.0
    for first, last in ((0, 1), (1, 4)):
        tokens = slice(offsets[first], offsets[last])
        rows = Rows(torch.tensor(offsets[first : last + 1] - offsets[first]), {"loss_mask": torch.tensor(mask[tokens])})
        whole += compute(loss, {"logprobs": torch.tensor(logprobs[tokens])}, rows).loss(loss.totals(batch)).item()
    assert whole == pytest.approx(-logprobs[mask == 1].mean(), rel=1e-12)


def test_an_empty_shard_counts_nothing():
    empty = Batch({"loss_mask": Ragged.from_rows([], dtype=np.uint8)})
    assert NLLLoss().totals(empty) == {"tokens": 0.0}


def test_a_first_token_under_the_mask_is_refused():
    tokens = Ragged.from_rows([[1, 2], [], [3, 4]], np.int32)
    batch = Batch({"tokens": tokens, "loss_mask": tokens.like(np.array([0, 1, 1, 1], np.uint8))})
    with pytest.raises(ValueError, match="first token of 1 of 3 rows, the first of them row 2"):
        NLLLoss().totals(batch)
