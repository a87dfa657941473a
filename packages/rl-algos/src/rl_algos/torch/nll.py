"""The computation of `rl_algos.losses.nll.NLLLoss`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_algos.losses.nll import NLLLoss
from rl_core.torch.loss import LossSums, Rows


def compute(_loss: NLLLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sum of the negative log-likelihood over one microbatch.

    Args:
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: `loss_mask` `[tokens]`.
    """
    # selected rather than multiplied: what lies off the mask may not be finite
    return LossSums({"tokens": -torch.where(rows["loss_mask"] > 0, reads["logprobs"], 0.0).sum()})
