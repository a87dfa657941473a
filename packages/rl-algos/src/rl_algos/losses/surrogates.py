"""Surrogates: the policy term of a token's loss, one per published objective, described; computed by
`rl_algos.torch.surrogates`.

Notation, for token t of sequence i with n_i sampled tokens: `A` its advantage, `logp` its logprob under the policy,
`prev` that before the step, `r = exp(logp - prev)` its ratio, `s = exp(mean of logp - prev over the sequence)` that of
its sequence, `clip(x) = min(max(x, 1 - clip_low), 1 + clip_high)`, `sg` stops the gradient. Log-ratios are bounded to
[-20, 20] before `exp`. How token terms are added up and divided is the affair of `rl_algos.losses.aggregation`; a
paper's own choice is named with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from rl_algos.losses.aggregation import AggregationName

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Surrogate:
    """Base of all surrogates: what their combinations with other terms depend on. Settings are the fields.

    Args:
        name: in configs, and of the function in `rl_algos.torch.surrogates`.
        level: whether each token has a ratio of its own, or one is shared by the whole sequence.
        columns: columns that it reads beside those of every policy loss; statistics of the whole step.
        aggregations: those that make sense with it.
        is_by_token: whether a token's term has no gradient by other tokens, so that tokens may be left out one by one.
    """

    name: ClassVar[str]
    level: ClassVar[Level] = "token"
    columns: ClassVar[tuple[str, ...]] = ()
    aggregations: ClassVar[tuple[AggregationName, ...]] = get_args(AggregationName)
    is_by_token: ClassVar[bool] = True


@dataclass(frozen=True)
class Clip(Surrogate):
    """`max(-A r, -A clip(r))` (PPO, arXiv:1707.06347); token mean or sequence mean.

    Args:
        clip_low, clip_high: asymmetric bounds (clip-higher of DAPO, arXiv:2503.14476).
        dual_clip: c; where `A < 0`, the loss is at most `-c A` (arXiv:1912.09729). None is unbounded.
    """

    name = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


@dataclass(frozen=True)
class GSPO(Surrogate):
    """`max(-A s, -A clip(s))` with the ratio of the sequence (GSPO, arXiv:2507.18071); sequence mean.

    The gradient is that of GSPO-token: `s` is taken as `sg(s) exp(logp - sg(logp))`, so that an advantage that
    differs by token acts on its own token. With one advantage per sequence both forms have the same gradient. With the
    aggregation `sequence-mean-token-sum` it is LUSPO (arXiv:2602.05261), which weighs a sequence by its length.

    Args:
        clip_low, clip_high, dual_clip: as of `Clip`.
    """

    name = "gspo"
    level = "sequence"
    aggregations = ("sequence-mean", "sequence-mean-token-sum")
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


@dataclass(frozen=True)
class CISPO(Surrogate):
    """`-A sg(clip(r)) logp`: a clipped ratio keeps the token's gradient (CISPO, arXiv:2506.13585); token mean.

    Args:
        clip_low, clip_high: as of `Clip`; the paper leaves the lower side open (`clip_low=1`).
    """

    name = "cispo"
    aggregations = ("token-mean", "token-sum", "sequence-mean-token-sum")
    clip_low: float = 0.2
    clip_high: float = 0.2


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """`-A logp`, without a ratio (REINFORCE; GPG, arXiv:2504.02546); token mean."""

    name = "reinforce"


@dataclass(frozen=True)
class SAPO(Surrogate):
    """`-A (4 / tau) sigmoid(tau (r - 1))`, a soft gate in place of the clip (SAPO, arXiv:2511.20347); sequence mean.

    Args:
        tau_positive: tau where `A > 0`.
        tau_negative: tau elsewhere; larger, since negative tokens destabilise more.
    """

    name = "sapo"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        _positive(self, "tau_positive", "tau_negative")


@dataclass(frozen=True)
class GMPO(Surrogate):
    """`-A g_i`, the geometric mean of clipped token ratios (GMPO, arXiv:2507.20673); sequence mean.

    `g_i = exp(mean over the sequence of l)`, `l = sign(A) min(sign(A) log r, sign(A) log clip(r))`, and A the mean
    advantage of the sequence. The paper's bounds, `exp(-0.4)` and `exp(0.4)`, are `clip_low=0.33, clip_high=0.49`.

    Args:
        clip_low, clip_high: as of `Clip`.
    """

    name = "gmpo"
    is_by_token = False
    level = "sequence"
    aggregations = ("sequence-mean", "sequence-mean-token-sum")
    clip_low: float = 0.2
    clip_high: float = 0.2


@dataclass(frozen=True)
class DPPOTV(Surrogate):
    """`-A r`, without gradient where the policy has moved away too far (DPPO, arXiv:2602.04879, binary TV); token mean.

    With `p = exp(logp)` and `q = exp(prev)`, a token is left out where `|p - q| > threshold` and the step would
    lead further away: `A > 0` and `p > q`, or `A < 0` and `p < q`.

    Args:
        threshold: of the total variation.
    """

    name = "dppo-tv"
    threshold: float = 0.2

    def __post_init__(self) -> None:
        _positive(self, "threshold")


@dataclass(frozen=True)
class DPPOKL(Surrogate):
    """As `DPPOTV`, with the divergence `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (DPPO, binary KL); token mean.

    Args:
        threshold: of the divergence, in nats.
    """

    name = "dppo-kl"
    threshold: float = 0.05

    def __post_init__(self) -> None:
        _positive(self, "threshold")


@dataclass(frozen=True)
class ClipCov(Surrogate):
    """As `Clip`, without gradient at some tokens of high covariance (Clip-Cov, arXiv:2505.22617); token mean.

    The covariance of a token is `(prev - mean prev) (A - mean A)`, means over all sampled tokens of the step. Of the
    tokens whose covariance is within [low, high], a random part, `share` of all sampled tokens, is left out. The
    paper takes `logp` in place of `prev`, which is the same in the first update of a step.

    Args:
        clip_low, clip_high: as of `Clip`.
        share: of the sampled tokens.
        low, high: bounds of the covariance.
    """

    name = "clip-cov"
    columns = ("high_covariance",)
    clip_low: float = 0.2
    clip_high: float = 0.2
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        _share(self.share)
        if self.low > self.high:
            raise ValueError(f"low must not be above high, got {self.low} and {self.high}")

    def chosen(self, covariance: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """bool `[tokens]`, the tokens left out, from the covariances of all sampled tokens of a step."""
        candidates = np.flatnonzero((covariance >= self.low) & (covariance <= self.high))
        count = min(round(self.share * len(covariance)), len(candidates))
        is_chosen = np.zeros(len(covariance), dtype=bool)
        is_chosen[random.choice(candidates, count, replace=False)] = True
        return is_chosen


@dataclass(frozen=True)
class KLCov(Surrogate):
    """`-A r`, and `+ weight |logp - prev|` at the tokens of highest covariance (KL-Cov, arXiv:2505.22617);
    token mean.

    The covariance is that of `ClipCov`; `share` of all sampled tokens, at least one, have the penalty.

    Args:
        share: of the sampled tokens.
        weight: of the penalty.
    """

    name = "kl-cov"
    columns = ("high_covariance",)
    share: float = 2e-3
    weight: float = 1.0

    def __post_init__(self) -> None:
        _share(self.share)
        _positive(self, "weight")

    def chosen(self, covariance: np.ndarray, _random: np.random.Generator) -> np.ndarray:
        """bool `[tokens]`, the tokens with the penalty, from the covariances of all sampled tokens of a step."""
        count = min(max(1, int(self.share * len(covariance))), len(covariance))
        is_chosen = np.zeros(len(covariance), dtype=bool)
        is_chosen[np.argsort(-covariance, kind="stable")[:count]] = True
        return is_chosen


@dataclass(frozen=True)
class VESPO(Surrogate):
    """`-A sg(W^k exp(lambda (1 - W))) logp` with the sequence's whole ratio W, the product of its tokens' (VESPO,
    arXiv:2602.10693); token mean.

    Args:
        k_positive, lambda_positive: k and lambda where `A >= 0`.
        k_negative, lambda_negative: k and lambda elsewhere.
    """

    name = "vespo"
    level = "sequence"
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        _positive(self, "k_positive", "lambda_positive", "k_negative", "lambda_negative")


SURROGATES: Mapping[str, type[Surrogate]] = {
    kind.name: kind for kind in (Clip, GSPO, CISPO, Reinforce, SAPO, GMPO, DPPOTV, DPPOKL, ClipCov, KLCov, VESPO)
}
"""All surrogates by name."""


def _positive(surrogate: Surrogate, *fields: str) -> None:
    for field in fields:
        if getattr(surrogate, field) <= 0:
            raise ValueError(f"{field} must be above 0, got {getattr(surrogate, field)}")


def _share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
