"""KL divergence of the policy from its reference: per token, from the token that was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rl_algos.losses.checked import CheckedConfig
from rl_core.config import Problem

KLType = Literal["k1", "k2", "k3"]


class KLPenalty(CheckedConfig):
    """An estimate of KL(policy || reference) at the sampled tokens, as a term of the loss or a penalty on rewards.

    With `d = ref - logp`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1` (Schulman, "Approximating KL divergence"). All
    have about the right value. As terms of the loss, their gradients differ (arXiv:2506.09477), for tokens drawn from
    the policy:

    - k1: its expected gradient is zero. It is refused without `unbiased`.
    - k2: its expected gradient is exactly the gradient of the KL divergence.
    - k3: its expected gradient is the gradient of KL(reference || policy), which agrees only near the reference.
    - with `unbiased`, the estimate is multiplied by `exp(logp - prev)`, whose gradient adds the score-function term:
      exact for k1 and k3 (k3 has less variance), even if the policy has moved since the tokens were sampled. k2
      would be inexact with it, and is refused.

    Clamps take a token's gradient away where they bind. No gradient passes through a penalty on rewards, so every
    estimator serves there; k1 is exact in expectation.
    """

    weight: float = Field(default=0.01, ge=0)
    """Weight of the KL divergence to the reference policy; with 0, no reference policy is kept. With `target`, the
    initial weight."""
    estimator: KLType = "k3"
    """Estimator of the KL divergence. As a term of the loss, k2 has the exact gradient, and the gradient of k3 is
    correct only near the reference; with `unbiased`, k1 and k3 have the exact gradient. k1 is refused without it."""
    unbiased: bool = False
    """Multiply the estimate by `exp(logp - prev)`, so that its expected gradient is the gradient of the KL divergence
    (arXiv:2506.09477)."""
    from_generation: bool = False
    """Multiply the estimate by `exp(logp - generation)` to correct for tokens that were not sampled by the current
    policy (DeepSeek-V3.2, arXiv:2512.02556). The factor has no gradient; with `unbiased`, it has one and replaces
    `exp(logp - prev)`."""
    in_reward: bool = False
    """Subtract the KL penalty from the rewards instead of adding it to the loss: the reward of each rollout is reduced
    by the sum over its sampled tokens. With the estimator `reinforce_plus_plus`, each token gets the sum of the
    penalties from that token on."""
    target: float | None = Field(default=None, gt=0)
    """Target mean KL divergence per sampled token; the weight is adapted at every step to reach it
    (arXiv:1909.08593). If unset, the weight is fixed."""
    horizon: int = Field(default=10000, gt=0)
    """Number of rollouts over which an adaptive weight changes by at most 20 %."""
    input_clamp: float | None = Field(default=20.0, gt=0)
    """Maximum absolute log-ratio that the estimator reads; null removes the limit, except that k3 always uses 20."""
    output_clamp: float | None = Field(default=10.0, gt=0)
    """Maximum absolute estimate. A token above it adds the maximum to the loss and nothing to the gradient; null
    removes the limit."""

    @property
    def is_in_loss(self) -> bool:
        """True if the penalty is a term of the loss."""
        return self.weight > 0 and not self.in_reward

    @property
    def is_in_reward(self) -> bool:
        """True if the penalty is subtracted from rewards."""
        return self.weight > 0 and self.in_reward

    def _problems(self) -> Iterator[Problem]:
        corrections = [key for key in ("unbiased", "from_generation") if getattr(self, key)]
        if self.weight == 0:
            for key in (*corrections, *(["in_reward"] if self.in_reward else [])):
                yield Problem.unused(key, "with weight=0")
            if self.target is not None:
                yield Problem("target", "needs an initial weight", got=self.target, remedy="Set weight above 0")
        elif self.in_reward:
            for key in corrections:
                yield Problem.unused(
                    key, "with in_reward=true, because it corrects a gradient and a penalty on rewards has none"
                )
        elif self.estimator == "k1" and not self.unbiased:
            yield Problem(
                "estimator",
                "has an expected gradient of zero as a term of the loss",
                got="k1",
                remedy="Set unbiased=true or in_reward=true, or use k2 or k3",
            )
        elif self.estimator == "k2" and self.unbiased:
            yield Problem(
                "unbiased",
                "makes the gradient of k2 inexact; it is exact without",
                got=True,
                remedy="Remove this key, or use k1 or k3",
            )
