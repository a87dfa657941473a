"""The computations of `rl_algos.losses.reward`."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from rl_algos.losses.reward import BradleyTerryLoss, RegressionLoss
from rl_algos.torch.pairs import Pairs
from rl_core.torch.loss import LossSums, MetricSum, Rows


def compute_pairs(loss: BradleyTerryLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of a `BradleyTerryLoss` over one microbatch of whole pairs.

    Args:
        loss: Loss with its use of margins and its centering weight.
        reads: `scores` float32 `[rows]`, with gradient.
        rows: Columns that `loss.columns` names.
    """
    pairs = Pairs.of(rows)
    chosen, rejected = reads["scores"][pairs.chosen], reads["scores"][pairs.rejected]
    difference = chosen - rejected
    if loss.margin == "subtract":
        difference = difference - rows["margin"][pairs.chosen]
    terms = -F.logsigmoid(difference)
    if loss.margin == "scale":
        terms = rows["margin"][pairs.chosen] * terms
    if loss.center_weight:
        terms = terms + loss.center_weight * (chosen + rejected).square()
    return LossSums({"pairs": terms.sum()}, pairs.metrics(chosen, rejected))


def compute_regression(_loss: RegressionLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sums of a `RegressionLoss` over one microbatch.

    Args:
        reads: `scores` float32 `[rows]`, with gradient.
        rows: Columns that `loss.columns` names.
    """
    scores = reads["scores"]
    metrics = {
        "score": MetricSum(scores.detach().sum(), "responses"),
        "target": MetricSum(rows["verdict"].sum(), "responses"),
    }
    return LossSums({"responses": (scores - rows["verdict"]).square().sum()}, metrics)
