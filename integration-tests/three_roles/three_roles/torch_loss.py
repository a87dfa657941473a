"""The computation behind `three_roles.loss.ValueLoss`, imported by the critic's workers alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_core.torch.loss import LossSums, Rows
from three_roles.loss import ValueLoss


def compute(_loss: ValueLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sum over one microbatch."""
    distance = reads["values"] - rows["targets"]
    return LossSums({"tokens": (distance.square() * rows["loss_mask"].to(distance.dtype)).sum()})
