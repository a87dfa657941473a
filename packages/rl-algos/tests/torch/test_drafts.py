"""The loss of a draft head."""

import numpy as np
import pytest
import torch

from rl_algos.losses.tokens import DECAY, DraftLoss
from rl_algos.torch.tokens import compute_drafts as compute
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.rows import to_rows


def test_later_tokens_of_drafts_weigh_less_and_all_are_averaged_over_sampled_tokens():
    tokens = Ragged.from_rows([np.arange(4), np.arange(3)], dtype=np.int32)
    batch = Batch({"tokens": tokens, "loss_mask": tokens.like(np.array([0, 1, 1, 1, 0, 0, 1], np.uint8))})
    loss, losses = DraftLoss(2), torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = compute(loss, {"draft_losses": losses}, to_rows(batch, torch.device("cpu")))
    expected = (losses[:, 0] + DECAY * losses[:, 1]).sum() / (1 + DECAY)
    assert float(sums.loss(loss.totals(batch))) == pytest.approx(float(expected) / 4)
    assert sum(loss.weights) == pytest.approx(1)
    assert [read.k for read in loss.reads] == [2]
