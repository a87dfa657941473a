"""Cross-entropy of drafts from the policy's distributions, described; computed by `rl_algos.torch.drafts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl_algos.losses.mask import num_masked
from rl_core.data.batch import Batch
from rl_core.model import Read, draft_losses

DECAY = 0.8
"""Weight of each token of a draft relative to the one before it, which must be accepted first (EAGLE-3,
arXiv:2503.01840)."""


@dataclass(frozen=True)
class DraftLoss:
    """Cross-entropy of a draft head's distributions from the policy's, at the tokens under `loss_mask` uint8
    `[tokens]`: averaged over all of them in the batch, and over the tokens of drafts with weights that fall by `DECAY`.

    Args:
        num_tokens: Tokens of a draft.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss_mask",)
    temperature: ClassVar[float] = 1.0
    num_tokens: int
    implementation: str = "rl_algos.torch.drafts:compute"

    @property
    def reads(self) -> tuple[Read, ...]:
        """The losses of the head."""
        return (draft_losses(self.num_tokens),)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each token of a draft; they sum to 1."""
        relative = [DECAY**place for place in range(self.num_tokens)]
        return tuple(weight / sum(relative) for weight in relative)

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` under the mask."""
        return {"tokens": num_masked(batch)}
