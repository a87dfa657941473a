"""Settings of the parts of the policy loss: aggregation, KL penalty, entropy bonus, filters and weights by age."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, NamedConfig, Problem, ProblemError, is_changed
from rl_core.model import UNDIVIDED


class CheckedConfig(Config):
    """A section that reports all its `_problems` together."""

    def _problems(self) -> Iterator[Problem]:
        """Yield settings that contradict one another."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise ProblemError(*problems)
        return self


AggregationName = Literal["token-mean", "sequence-mean", "token-sum", "sequence-mean-token-sum"]


class Aggregation(NamedConfig):
    """A sum over all sampled tokens of the batch, divided by one global count.

    With token losses l, the N sampled tokens of the batch, and the R sequences that have any, n_i tokens each:

    - `token-mean`: `sum l / N` (DAPO, arXiv:2503.14476): long sequences weigh more.
    - `sequence-mean`: `sum_i (sum_t l / n_i) / R` (GRPO, arXiv:2402.03300): each sequence weighs the same.
    - `sequence-mean-token-sum`: `sum_i (sum_t l / divisor) / R`; with a constant divisor, the longest response allowed,
      it is Dr. GRPO's (arXiv:2503.20783): neither short nor long sequences are favoured.
    - `token-sum`: `sum l / divisor`: a batch with more tokens takes a larger step.

    Tokens and sequences that a filter (the importance correction, a mismatch threshold) excludes from the sums stay in
    N and R. Tokens outside the loss mask, such as rollouts that failed or are filtered as overlong, do not.
    """

    settings_follow_name: ClassVar[bool] = False

    name: AggregationName = "token-mean"
    """Name of the aggregation: `token-mean`, `sequence-mean`, `token-sum` or `sequence-mean-token-sum`. Sequences and
    tokens that a filter of the loss excludes from the sums still count in the denominators; rollouts that failed or
    were filtered as overlong do not."""
    divisor: float = Field(default=1.0, gt=0)
    """Divisor of sums over tokens, such as the maximum response length (Dr. GRPO); only for
    `token-sum` and `sequence-mean-token-sum`."""

    @property
    def denominator(self) -> str:
        """Name of the total that sums are divided by."""
        return _DENOMINATORS[self.name]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.divisor != 1 and not self.name.endswith("token-sum"):
            remedy = "Remove this key, or use the aggregation token-sum or sequence-mean-token-sum"
            raise ProblemError(Problem.unused("divisor", f"with the aggregation {self.name}", remedy=remedy))
        return self


_DENOMINATORS: Mapping[AggregationName, str] = {
    "token-mean": "tokens",
    "sequence-mean": "sequences",
    "token-sum": UNDIVIDED,
    "sequence-mean-token-sum": "sequences",
}


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
    """Weight of the KL divergence to the reference policy; with 0, no reference policy is kept unless `measured` is
    set. With `target`, the initial weight."""
    measured: bool = False
    """With `weight: 0`, keep the reference policy and write the metric `policy/kl` without a penalty."""
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
        """True if the penalty is a term of the loss, or the loss measures the divergence only."""
        return self.measured or (self.weight > 0 and not self.in_reward)

    @property
    def is_in_reward(self) -> bool:
        """True if the penalty is subtracted from rewards."""
        return self.weight > 0 and self.in_reward

    def _problems(self) -> Iterator[Problem]:
        corrections = [key for key in ("unbiased", "from_generation") if getattr(self, key)]
        if self.measured and self.weight > 0:
            yield Problem.unused("measured", "with weight above 0, which measures the divergence in any case")
        if self.weight == 0:
            for key in (*corrections, *(["in_reward"] if self.in_reward else [])):
                yield Problem.unused(key, "with weight=0")
            if self.target is not None:
                yield Problem("target", "needs an initial weight", got=self.target, remedy="Set weight above 0")
        elif self.in_reward:
            because = "with in_reward=true, because it corrects a gradient and a penalty on rewards has none"
            yield from (Problem.unused(key, because) for key in corrections)
        elif self.estimator == "k1" and not self.unbiased:
            reason = "has an expected gradient of zero as a term of the loss"
            remedy = "Set unbiased=true or in_reward=true, or use k2 or k3"
            yield Problem("estimator", reason, got="k1", remedy=remedy)
        elif self.estimator == "k2" and self.unbiased:
            reason, remedy = "makes the gradient of k2 inexact; it is exact without", "Remove this key, or use k1 or k3"
            yield Problem("unbiased", reason, got=True, remedy=remedy)


class EntropyBonus(CheckedConfig):
    """A term of the loss that increases the mean entropy of the next token's distribution."""

    weight: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy of the next token's distribution, which the loss increases; with `target`, the initial
    weight."""
    measured: bool = False
    """Without a bonus, write the metric `policy/entropy` nevertheless."""
    target: float | None = Field(default=None, gt=0)
    """Target entropy, below which the bonus applies. Its weight increases by `weight_step` at each step below the
    target and decreases above it (Skywork-OR1, arXiv:2505.22312). If unset, the weight is fixed."""
    weight_step: float = Field(default=0.005, gt=0)
    """Change of an adaptive weight per step."""

    @property
    def is_on(self) -> bool:
        """True if the loss has the term, or measures the entropy only."""
        return self.measured or self.weight > 0 or self.target is not None

    def _problems(self) -> Iterator[Problem]:
        if self.measured and (self.weight > 0 or self.target is not None):
            yield Problem.unused("measured", "with a bonus, which measures the entropy in any case")


class Filters(Config):
    """Tokens and sequences that the policy term leaves out; they stay in the other terms and in the counts."""

    off_policy_threshold: float | None = Field(default=None, gt=0)
    """Exclude sequences with a negative advantage whose mean `generation - logp` is above this (off-policy sequence
    masking, DeepSeek-V3.2, arXiv:2512.02556). If unset, none is excluded."""
    top_entropy_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the step's sampled tokens to train on: the tokens with the highest policy entropy before the update
    (arXiv:2506.01939 uses 0.2). If unset, all of them train."""
    max_second_moment: float | None = Field(default=None, gt=0)
    """Maximum of the mean `(prev - generation)^2` over the sampled tokens of a step that train. The tokens with the
    largest squares are left out until the mean of the others is at most this (M2PO, arXiv:2510.01161, uses 0.04). If
    unset, all of them train."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the step, uint8 `[tokens]`, that are 1 at the tokens whose policy term stays."""
        chosen = {"high_entropy": self.top_entropy_share, "small_moment": self.max_second_moment}
        return tuple(column for column, setting in chosen.items() if setting is not None)


class Demonstrations(NamedConfig, CheckedConfig):
    """The term of demonstrations, responses of a dataset that the policy did not sample. No other term has their
    tokens, and neither have the metrics of rollouts.

    With the N tokens of the demonstrations, p the probability of a token under the policy and A its advantage:

    - `nll`: `(1 - weight) L + weight / N sum w (-log p)`, L the loss of the rollouts (CHORD, arXiv:2508.11408). `w` is
      1, or with `by_probability` `sg(p (1 - p))`, so that tokens that the policy knows already, or would never write,
      pull least.
    - `shaped`: `-A p / (p + gamma)` in place of the surrogate, added up with the rollouts and divided by the counts of
      both (LUFFY, arXiv:2504.14945): the ratio to a sampler that is certain of its tokens, shaped so that unlikely
      tokens have the largest gradients.
    """

    settings_follow_name: ClassVar[bool] = False

    name: Literal["nll", "shaped"] = "nll"
    """Name of the term: `nll`, the negative log-likelihood, or `shaped`, the surrogate `-A p / (p + gamma)` of
    demonstrations that have a reward, as `demonstrations.share` gives them one."""
    weight: float = Field(default=0.1, gt=0, le=1)
    """Weight of the mean negative log-likelihood of demonstrations; all other terms have 1 minus it. With
    `decay_steps`, the weight before the decay."""
    by_probability: bool = False
    """Weigh each token of `nll` by `p (1 - p)`, its probability p under the policy (CHORD-phi)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the weight rises linearly from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Number of steps after the warmup over which the weight falls to `final_weight`, along a cosine; with 0 it stays
    (CHORD-mu uses a weight of 0.9, a final weight of 0.05 and 200 steps)."""
    final_weight: float = Field(default=0.0, ge=0, le=1)
    """Weight after `decay_steps`."""
    gamma: float = Field(default=0.1, gt=0)
    """Constant of `shaped`: the smaller it is, the less likely are the tokens that learn most."""

    def at_step(self, step: int) -> Self:
        """Return the term with the weight of a step, counted from 1, and no schedule."""
        done = step - 1
        weight = self.weight
        if done < self.warmup_steps:
            weight *= done / self.warmup_steps
        elif self.decay_steps:
            share = min((done - self.warmup_steps) / self.decay_steps, 1.0)
            weight = self.final_weight + (weight - self.final_weight) * (1 + math.cos(math.pi * share)) / 2
        return self.model_copy(update={"weight": weight, "warmup_steps": 0, "decay_steps": 0})

    def _problems(self) -> Iterator[Problem]:
        settings = ("weight", "by_probability", "warmup_steps", "decay_steps", "final_weight")
        for key in settings if self.name == "shaped" else ("gamma",):
            if is_changed(self, key):
                yield Problem.unused(key, f"with the name {self.name}")
        if self.final_weight and not self.decay_steps and self.name == "nll":
            yield Problem.unused("final_weight", "with decay_steps=0")


class StalenessDecay(Config):
    """Weights the policy term of a token by `decay ** a`, with its age `a = max(0, version - v)` in weight versions.

    `version` is the version of the weights that the step trains, and v the version that sampled the token, so tokens of
    one rollout may differ. The counts that the loss is divided by stay as they are: older tokens take smaller steps, as
    updates by older gradients do in staleness-aware SGD (arXiv:1511.05950, which divides by the age).
    """

    decay: float = Field(gt=0, lt=1)
    """Factor of a token's policy term per weight version between the weights that sampled it and the weights that
    train, in addition to the importance weight."""
