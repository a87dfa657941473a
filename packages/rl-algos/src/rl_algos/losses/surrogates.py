"""Descriptions of surrogates, the policy term of a token's loss, one per published objective;
`rl_algos.torch.surrogates` computes them.

Notation, for token t of sequence i with n_i sampled tokens: `A` is its advantage, `logp` its logprob under the policy,
`prev` its logprob before the step, `r = exp(logp - prev)` its ratio, `s = exp(mean of logp - prev over the sequence)`
the ratio of its sequence, `clip(x) = min(max(x, 1 - clip_low), 1 + clip_high)`, and `sg` stops the gradient. Log-ratios
are bounded to [-20, 20] before `exp`. `rl_algos.losses.terms` defines how token terms are added up and divided;
each surrogate mentions the choice of its paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from rl_algos.losses.terms import AggregationName
from rl_core.config import NamedConfig, Problem, ProblemError

Level = Literal["token", "sequence"]
SurrogateName = Literal[
    "clip",
    "gspo",
    "cispo",
    "reinforce",
    "sapo",
    "gmpo",
    "dppo-tv",
    "dppo-kl",
    "clip-cov",
    "kl-cov",
    "vespo",
    "topr",
    "dro",
]


class Surrogate(NamedConfig):
    """The policy term of a token; the keys next to `name` are the settings of that surrogate.

    Class attributes state what combinations with other terms depend on:

    - `level`: `token` if each token has its own ratio, `sequence` if the whole sequence shares one.
    - `columns`: Columns that it reads next to the columns of every policy loss; statistics of the whole step.
    - `aggregations`: Aggregations that make sense with it.
    - `is_by_token`: True if a token's term has no gradient by other tokens, so that single tokens may be left out.
    - `of_step`: Settings that choose tokens among all tokens of a step.
    """

    level: ClassVar[Level] = "token"
    columns: ClassVar[tuple[str, ...]] = ()
    aggregations: ClassVar[tuple[AggregationName, ...]] = get_args(AggregationName)
    is_by_token: ClassVar[bool] = True
    of_step: ClassVar[tuple[str, ...]] = ()

    name: SurrogateName
    """Name of the surrogate: `clip`, `gspo`, `cispo`, `reinforce`, `sapo`, `gmpo`, `dppo-tv`, `dppo-kl`, `clip-cov`,
    `kl-cov`, `vespo`, `topr` or `dro`."""

    @model_validator(mode="after")
    def _is_the_one_named(self) -> Self:
        own = type(self).model_fields["name"].default
        if self.name != own:
            raise ValueError(f"{type(self).__name__} is the surrogate {own}, not {self.name}")
        return self

    @property
    def by_row(self) -> dict[str, float]:
        """The settings that may differ between the rows of a step: numbers in the term of a token."""
        return {key: value for key, value in self if isinstance(value, float) and key not in self.of_step}


class ClippedSurrogate(Surrogate):
    """A surrogate whose ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Lower clip range: the ratio is clipped below at 1 minus this; 1 turns the lower clip off."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip range: the ratio is clipped above at 1 plus this (clip-higher of DAPO, arXiv:2503.14476, uses
    0.28)."""


class DualClippedSurrogate(ClippedSurrogate):
    """A clipped surrogate with a bound for tokens with a negative advantage."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss of tokens with a negative advantage, in units of -advantage (dual clip,
    arXiv:1912.09729). If unset, there is no bound."""


class Clip(DualClippedSurrogate):
    """`max(-A r, -A clip(r))` (PPO, arXiv:1707.06347); token mean or sequence mean. With `dual_clip` c, the loss is at
    most `-c A` if `A < 0`."""

    name: SurrogateName = "clip"


class GSPO(DualClippedSurrogate):
    """`max(-A s, -A clip(s))` with the ratio of the sequence (GSPO, arXiv:2507.18071); sequence mean.

    The gradient is the gradient of GSPO-token: `s` is taken as `sg(s) exp(logp - sg(logp))`, so that an advantage that
    differs by token acts on its own token. With one advantage per sequence both forms have the same gradient. With the
    aggregation `sequence-mean-token-sum` it is LUSPO (arXiv:2602.05261), which weighs a sequence by its length.
    """

    level = "sequence"
    aggregations = ("sequence-mean", "sequence-mean-token-sum")

    name: SurrogateName = "gspo"


class CISPO(ClippedSurrogate):
    """`-A sg(clip(r)) logp`: a clipped ratio keeps the token's gradient (CISPO, arXiv:2506.13585); token mean. The
    paper leaves the lower side open (`clip_low=1`)."""

    aggregations = ("token-mean", "token-sum", "sequence-mean-token-sum")

    name: SurrogateName = "cispo"


class Reinforce(Surrogate):
    """`-A logp`, without a ratio (REINFORCE; GPG, arXiv:2504.02546); token mean."""

    name: SurrogateName = "reinforce"


class SAPO(Surrogate):
    """`-A (4 / tau) sigmoid(tau (r - 1))`, a soft gate instead of the clip (SAPO, arXiv:2511.20347); sequence mean."""

    name: SurrogateName = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature tau of the gate of tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature tau of the gate of all other tokens; larger, because they destabilise more."""


class GMPO(ClippedSurrogate):
    """`-A g_i`, the geometric mean of clipped token ratios (GMPO, arXiv:2507.20673); sequence mean.

    `g_i = exp(mean over the sequence of l)`, `l = sign(A) min(sign(A) log r, sign(A) log clip(r))`, and A the mean
    advantage of the sequence. The paper's bounds, `exp(-0.4)` and `exp(0.4)`, are `clip_low=0.33, clip_high=0.49`.
    """

    is_by_token = False
    level = "sequence"
    aggregations = ("sequence-mean", "sequence-mean-token-sum")

    name: SurrogateName = "gmpo"


class DPPOTV(Surrogate):
    """`-A r`, without gradient where the policy has moved away too far (DPPO, arXiv:2602.04879, binary TV); token mean.

    With `p = exp(logp)` and `q = exp(prev)`, a token is left out where `|p - q| > threshold` and the step would
    lead further away: `A > 0` and `p > q`, or `A < 0` and `p < q`.
    """

    name: SurrogateName = "dppo-tv"
    threshold: float = Field(default=0.2, gt=0)
    """Maximum total variation; tokens above it have no gradient."""


class DPPOKL(Surrogate):
    """See `DPPOTV`; the divergence is `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (DPPO, binary KL); token mean."""

    name: SurrogateName = "dppo-kl"
    threshold: float = Field(default=0.05, gt=0)
    """Maximum divergence in nats; tokens above it have no gradient."""


class ClipCov(ClippedSurrogate):
    """`Clip` without gradient at some tokens of high covariance (Clip-Cov, arXiv:2505.22617); token mean.

    The covariance of a token is `(prev - mean prev) (A - mean A)`, means over all sampled tokens of the step. Of the
    tokens whose covariance is within [low, high], a random part, `share` of all sampled tokens, is left out. The
    paper uses `logp` instead of `prev`, which is the same in the first update of a step.
    """

    columns = ("high_covariance",)
    of_step = ("share", "low", "high")

    name: SurrogateName = "clip-cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the sampled tokens of a step to exclude."""
    low: float = 1.0
    """Minimum covariance of a token that may be excluded."""
    high: float = 5.0
    """Maximum covariance of a token that may be excluded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ProblemError(Problem("low", f"must not exceed high ({self.high})", got=self.low))
        return self

    def chosen(self, covariance: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return bool `[tokens]`, the tokens left out, from the covariances of all sampled tokens of a step."""
        candidates = np.flatnonzero((covariance >= self.low) & (covariance <= self.high))
        count = min(round(self.share * len(covariance)), len(candidates))
        is_chosen = np.zeros(len(covariance), dtype=bool)
        is_chosen[random.choice(candidates, count, replace=False)] = True
        return is_chosen


class KLCov(Surrogate):
    """`-A r`, and `+ weight |logp - prev|` at the tokens of highest covariance (KL-Cov, arXiv:2505.22617);
    token mean.

    See `ClipCov` for the covariance; `share` of all sampled tokens, at least one, have the penalty.
    """

    columns = ("high_covariance",)
    of_step = ("share",)

    name: SurrogateName = "kl-cov"
    share: float = Field(default=2e-3, gt=0, le=1)
    """Share of the sampled tokens of a step that have the penalty (at least one token)."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""

    def chosen(self, covariance: np.ndarray, _random: np.random.Generator) -> np.ndarray:
        """Return bool `[tokens]`, the tokens with the penalty, from the covariances of all sampled tokens of a step."""
        count = min(max(1, int(self.share * len(covariance))), len(covariance))
        is_chosen = np.zeros(len(covariance), dtype=bool)
        is_chosen[np.argsort(-covariance, kind="stable")[:count]] = True
        return is_chosen


class VESPO(Surrogate):
    """`-A sg(W^k exp(lambda (1 - W))) logp` with the sequence's whole ratio W, the product of its tokens' (VESPO,
    arXiv:2602.10693); token mean."""

    level = "sequence"

    name: SurrogateName = "vespo"
    k_positive: float = Field(default=2.0, gt=0)
    """Power k of the ratio of tokens with an advantage of 0 or above."""
    lambda_positive: float = Field(default=3.0, gt=0)
    """Rate lambda of tokens with an advantage of 0 or above."""
    k_negative: float = Field(default=3.0, gt=0)
    """Power k of the ratio of tokens with a negative advantage."""
    lambda_negative: float = Field(default=2.0, gt=0)
    """Rate lambda of tokens with a negative advantage."""


class TOPR(Surrogate):
    """`-A sg(w) logp`, with `w = min(W, 1)` for tokens with a negative advantage and 1 for the others, W the whole
    ratio of the sequence (tapered off-policy REINFORCE, arXiv:2503.14286); token mean. Good rollouts are learned
    however old they are, and bad ones only as far as the policy would still sample them."""

    level = "sequence"

    name: SurrogateName = "topr"


class DRO(Surrogate):
    """`-A logp + beta / 2 (logp - prev)^2` (direct reward optimisation, arXiv:2405.19107, by token); token mean."""

    name: SurrogateName = "dro"
    beta: float = Field(default=0.05, gt=0)
    """Weight of the squared log-ratio, which keeps the policy near the one that sampled."""


_KINDS: tuple[type[Surrogate], ...] = (
    Clip, GSPO, CISPO, Reinforce, SAPO, GMPO, DPPOTV, DPPOKL, ClipCov, KLCov, VESPO, TOPR, DRO,
)  # fmt: skip
SURROGATES: Mapping[str, type[Surrogate]] = {kind.model_fields["name"].default: kind for kind in _KINDS}
"""All surrogates by name."""
