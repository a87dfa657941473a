"""Negative log-likelihood, described; computed by `rl_algos.torch.nll`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_algos.losses.mask import loss_mask
from rl_core.batch import Batch
from rl_core.model import LOGPROBS, Read


@dataclass(frozen=True)
class NLLLoss:
    """`-logp` of the tokens under `loss_mask`, averaged over all of them in the batch.

    The mask of a row's first token must be 0: nothing predicts it.
    """

    implementation: str = "rl_algos.torch.nll:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 `[tokens]`."""
        return ("loss_mask",)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The policy's logprobs."""
        return (LOGPROBS,)

    @property
    def temperature(self) -> float:
        """1: what is learned is the distribution itself."""
        return 1.0

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` under the mask."""
        return {"tokens": float(loss_mask(batch).values.sum(dtype="int64"))}
