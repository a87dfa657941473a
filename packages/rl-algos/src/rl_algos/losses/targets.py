"""Losses over targets by position, as programs of the `tinker` client ask for them, described; computed in
`rl_algos.torch.targets`.

Index i of a column belongs to the distribution of token i given those before it, and its targets may differ from the
token that is there. All losses are plain sums over the batch, divided by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rl_algos.losses.surrogates import SURROGATES, Surrogate
from rl_core.data.batch import Batch
from rl_core.model import Read, logprobs_at

TARGETS = "target_tokens"
"""Column of the ids whose logprobs are read, int32 `[tokens, k]`; -1 for none."""

WEIGHTS = "target_weights"
"""Column of their weights, float32 `[tokens, k]`."""

SAMPLING_LOGPROBS = "target_logprobs"
"""Column of their logprobs when they were sampled, float32 `[tokens]`."""

ADVANTAGES = "advantages"
"""Column of their advantages, float32 `[tokens]`."""

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
"""Columns of the smallest and the largest ratio of a token that is not clipped, float32 `[tokens]`."""

RATIO_MASK = "sequence_ratio_mask"
"""Column that is not 0 at the tokens whose ratios make the ratio of a sequence, float32 `[tokens]`."""

DRO_BETA = 0.05
"""Weight of the squared log-ratio of `dro`, unless a program gives another."""

LOSS_SUM = "loss:sum"
"""Metric: the loss."""

TargetObjective = Literal["importance_sampling", "ppo", "cispo", "gspo", "dro"]

SUMMED_SURROGATES: Mapping[str, type[Surrogate]] = {
    name: kind
    for name, kind in SURROGATES.items()
    if name not in get_args(TargetObjective) and "high_covariance" not in kind.columns
}
"""The surrogates of `rl_algos.losses.surrogates` that a sum over targets can have: those that need no statistics of a
whole step."""


@dataclass(frozen=True)
class _TargetLoss:
    """Base of the losses over targets."""

    reads: ClassVar[tuple[Read, ...]] = (logprobs_at(TARGETS),)
    temperature: ClassVar[float] = 1.0

    def totals(self, _batch: Batch) -> Mapping[str, float]:
        """Return no totals: the loss is a sum."""
        return {}


@dataclass(frozen=True)
class TargetNLLLoss(_TargetLoss):
    """`sum of -w logp` over all targets; a position may have several."""

    columns: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    implementation: str = "rl_algos.torch.targets:compute_nll"


@dataclass(frozen=True)
class TargetPolicyLoss(_TargetLoss):
    """The sum of a policy objective over targets, one for each position.

    With `r = exp(logp - q)`, q the logprob when the target was sampled, A its advantage, `clip` the bounds of its two
    thresholds, and `sg` a stop-gradient:

    - `importance_sampling`: `-r A`.
    - `ppo`: `-min(r A, clip(r) A)` (arXiv:1707.06347).
    - `cispo`: `-sg(clip(r)) logp A` (arXiv:2506.13585).
    - `gspo`: `-min(s A, clip(s) A)`, with s the geometric mean of r over the masked targets of the row, and the
      gradient of the target's own logprob (GSPO-token, arXiv:2507.18071).
    - `dro`: `-(logp A - beta / 2 (logp - q)^2)` (arXiv:2405.19107).

    Args:
        objective: One of these.
        beta: Weight of the squared log-ratio of `dro`.
    """

    objective: TargetObjective
    beta: float = DRO_BETA
    implementation: str = "rl_algos.torch.targets:compute_policy"

    @property
    def columns(self) -> tuple[str, ...]:
        """Logprobs and advantages of the targets, and the further inputs of the objective."""
        clips = (CLIP_LOW, CLIP_HIGH) if self.objective in ("ppo", "cispo", "gspo") else ()
        return (SAMPLING_LOGPROBS, ADVANTAGES, *clips, *((RATIO_MASK,) if self.objective == "gspo" else ()))


@dataclass(frozen=True)
class TargetSurrogateLoss(_TargetLoss):
    """The sum of a surrogate of `rl_algos.losses.surrogates` over the targets under `loss_mask`.

    Args:
        surrogate: One of `SUMMED_SURROGATES`.
    """

    surrogate: Surrogate
    columns: ClassVar[tuple[str, ...]] = (SAMPLING_LOGPROBS, ADVANTAGES, "loss_mask")
    implementation: str = "rl_algos.torch.targets:compute_surrogate"
