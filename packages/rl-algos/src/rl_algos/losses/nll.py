"""Negative log-likelihood, described; computed by `rl_algos.torch.nll`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl_algos.losses.mask import num_masked
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, Read


@dataclass(frozen=True)
class NLLLoss:
    """`-logp` of the tokens under `loss_mask` uint8 `[tokens]`, averaged over all of them in the batch.

    The mask of a row's first token must be 0: nothing predicts it.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss_mask",)
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    temperature: ClassVar[float] = 1.0
    implementation: str = "rl_algos.torch.nll:compute"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` under the mask."""
        return {"tokens": num_masked(batch)}
