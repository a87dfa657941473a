"""KL divergence of the policy from its reference: per token, from the token that was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KLType = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class KLPenalty:
    """An estimate of KL(policy || reference) at the states that were sampled, as a term of the loss.

    With `d = ref - logp`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1` (Schulman, "Approximating KL divergence"). All
    have about the right value, but a gradient is another matter (arXiv:2506.09477), for tokens drawn from the policy:

    - k1: its expected gradient is zero. It is refused without `unbiased`.
    - k2: its expected gradient is exactly that of the KL divergence.
    - k3: its expected gradient is that of KL(reference || policy), which agrees near the reference only.
    - with `unbiased`, the estimate is multiplied by `exp(logp - prev)`, whose gradient adds the score-function term:
      exact for k1 and k3 (k3 has less variance), also when the policy has moved since the tokens were sampled. k2
      would be inexact with it, and is refused.

    Clamps take a token's gradient away where they bind.

    Args:
        weight: of the term.
        estimator: k1, k2 or k3.
        input_clamp, output_clamp: bounds of `|d|` and of the absolute estimate; None is unbounded, but for the d of
            k3, which is within plus or minus 20. A token beyond a bound adds the bound and has no gradient.
        unbiased: whether to add the score-function term.
        from_generation: whether the tokens count as drawn from the generator: the estimate is multiplied by
            `exp(logp - generation)`, without gradient, or with it where `unbiased`. The latter is the term of
            DeepSeek-V3.2 (arXiv:2512.02556).
    """

    weight: float
    estimator: KLType = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0
    unbiased: bool = False
    from_generation: bool = False

    def __post_init__(self) -> None:
        if self.estimator == "k1" and not self.unbiased:
            raise ValueError("k1 has no gradient in expectation; use unbiased=True, k2 or k3")
        if self.estimator == "k2" and self.unbiased:
            raise ValueError(
                "k2 has the exact gradient by itself and is inexact with unbiased=True; use k1 or k3 with it"
            )
