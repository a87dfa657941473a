"""Losses with one term per token, described: likelihood, values of a critic, and drafts; computed in
`rl_algos.torch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_algos.losses.mask import LossByToken
from rl_core.model import LOGPROBS, VALUES, Read, draft_losses


@dataclass(frozen=True)
class NLLLoss(LossByToken):
    """`-logp` of the tokens under `loss_mask` uint8 `[tokens]`, averaged over all of them in the batch.

    The mask of a row's first token must be 0: nothing predicts it.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss_mask",)
    reads: ClassVar[tuple[Read, ...]] = (LOGPROBS,)
    temperature: ClassVar[float] = 1.0
    implementation: str = "rl_algos.torch.tokens:compute_nll"


@dataclass(frozen=True)
class ValueLoss(LossByToken):
    """`max((V - R)^2, (clip(V) - R)^2) / 2` with the return R of each sampled token, averaged over all of them in the
    batch (the clipped value loss of PPO, arXiv:1707.06347 and its code).

    `clip(V) = min(max(V, v - c), v + c)`, v the value before the step: once a value has moved by more than c, moving
    it further towards the return has no gradient.

    Args:
        clip: C; None takes `(V - R)^2 / 2`.
    """

    reads: ClassVar[tuple[Read, ...]] = (VALUES,)
    temperature: ClassVar[float] = 1.0
    clip: float | None = None
    implementation: str = "rl_algos.torch.tokens:compute_value"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask` uint8 and `returns` `[tokens]`, and `values` `[tokens]` before the step, to clip by."""
        return ("loss_mask", "returns") if self.clip is None else ("loss_mask", "returns", "values")


DECAY = 0.8
"""Weight of each token of a draft relative to the one before it, which must be accepted first (EAGLE-3,
arXiv:2503.01840)."""


@dataclass(frozen=True)
class DraftLoss(LossByToken):
    """Cross-entropy of a draft head's distributions from the policy's, at the tokens under `loss_mask` uint8
    `[tokens]`: averaged over all of them in the batch, and over the tokens of drafts with weights that fall by `DECAY`.

    Args:
        num_tokens: Tokens of a draft.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss_mask",)
    temperature: ClassVar[float] = 1.0
    num_tokens: int
    implementation: str = "rl_algos.torch.tokens:compute_drafts"

    @property
    def reads(self) -> tuple[Read, ...]:
        """The losses of the head."""
        return (draft_losses(self.num_tokens),)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each token of a draft; they sum to 1."""
        relative = [DECAY**place for place in range(self.num_tokens)]
        return tuple(weight / sum(relative) for weight in relative)
