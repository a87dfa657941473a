"""The clipped policy loss of GRPO and its variants, described; computed by `rl_algos.torch.policy_loss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_core.batch import Batch
from rl_core.model import LOGPROBS, Read

KLType = Literal["k1", "k2", "k3"]
Truncation = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weighing of the policy term by `exp(prev - generation)`, against what the engine sampled differently.

    Args:
        truncation: `tis` caps weights at `high`, `icepop` zeroes
            tokens outside `[low, high]`, `seq-mask-tis` drops sequences whose geometric mean weight is outside.
        low, high: bounds; None is unbounded.
    """

    truncation: Truncation = "tis"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class KLPenalty:
    """KL divergence to the reference policy, estimated per token (Schulman, "Approximating KL Divergence").

    Args:
        weight: of the term.
        estimator: with `d = ref - logp`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`.
        input_clamp, output_clamp: bounds of `|d|` and of the absolute estimate; None is unbounded.
    """

    weight: float
    estimator: KLType = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0


@dataclass(frozen=True)
class PolicyLoss:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` per token, with `r = exp(logp - prev)` (arXiv:1707.06347).

    Args:
        clip_low, clip_high: asymmetric clipping (DAPO, arXiv:2503.14476).
        dual_clip: bounds the loss at `-dual_clip * A` where `A < 0` (arXiv:1912.09729).
        level: `token` means over all tokens of the batch, `sequence` over sequences of each sequence's mean.
        sequence_ratio: the ratio of a token is that of its sequence's mean log-ratio (GSPO, arXiv:2507.18071).
        cispo: `-A stopgrad(clip(r)) logp` (arXiv:2506.13585).
        on_policy: the ratio is 1 with its gradient; `prev_logprobs` are those of the pass itself and no column.
        kl: the KL term, None for none.
        importance: the correction, None for none.
        mismatch_threshold: sequences whose mean `exp|prev - generation|` is above it are left out of the numerators.
        temperature: of sampling.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    level: Literal["token", "sequence"] = "token"
    sequence_ratio: bool = False
    cispo: bool = False
    on_policy: bool = False
    kl: KLPenalty | None = None
    importance: ImportanceCorrection | None = None
    mismatch_threshold: float | None = None
    temperature: float = 1.0
    implementation: str = "rl_algos.torch.policy_loss:compute"

    @property
    def columns(self) -> tuple[str, ...]:
        """`loss_mask`, `generation_logprobs` `[tokens]`, `advantages` `[rows]` or `[tokens]`, and what the terms in use
        compare with.
        """
        prev = () if self.on_policy else ("prev_logprobs",)
        ref = ("ref_logprobs",) if self.kl else ()
        return ("loss_mask", "advantages", "generation_logprobs", *prev, *ref)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The policy's logprobs."""
        return (LOGPROBS,)

    @property
    def denominator(self) -> str:
        """Name of the total that the loss is divided by."""
        return "tokens" if self.level == "token" else "sequences"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """`tokens` that train, and `sequences` with at least one."""
        sampled = batch.ragged("loss_mask").sums()
        return {"tokens": float(sampled.sum()), "sequences": float(np.count_nonzero(sampled))}
