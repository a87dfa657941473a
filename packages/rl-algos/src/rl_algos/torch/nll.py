"""The computation behind `rl_algos.losses.nll.NLLLoss`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_algos.losses.nll import NLLLoss
from rl_core.torch.loss import LossSums, Rows


def compute(_loss: NLLLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Sum of the negative log-likelihood over one microbatch.

    Args:
        reads: `logprobs` float32 `[tokens]`, with gradient.
        rows: `loss_mask` `[tokens]`.
    """
    logprobs = reads["logprobs"]
    return LossSums({"tokens": -(logprobs * rows["loss_mask"].to(logprobs.dtype)).sum()})
