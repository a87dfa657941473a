"""The computation of `rl_algos.losses.drafts.DraftLoss`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_algos.losses.drafts import DraftLoss
from rl_core.torch.loss import LossSums, Rows


def compute(loss: DraftLoss, reads: Mapping[str, Tensor], rows: Rows) -> LossSums:
    """Weighted sum of the losses of one microbatch.

    Args:
        loss: Description with the weights.
        reads: `draft_losses` float32 `[tokens, num_tokens]`, with gradient; 0 off the mask.
        rows: Rows of the microbatch.
    """
    losses = reads["draft_losses"]
    return LossSums({"tokens": (losses * losses.new_tensor(loss.weights)).sum()})
