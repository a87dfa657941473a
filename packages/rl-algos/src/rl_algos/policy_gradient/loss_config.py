"""Settings of the loss: which surrogate, how it is added up, and the terms beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_algos.losses.aggregation import AggregationName
from rl_algos.losses.importance import Statistic, Truncation
from rl_algos.losses.kl import KLType
from rl_algos.losses.policy import RatioDenominator
from rl_algos.losses.surrogates import Level
from rl_core.config import Config, NamedConfig


class SurrogateConfig(NamedConfig):
    """The policy term of a token; the keys beside `name` are the settings of that surrogate."""

    name: str | None = None
    """`clip`, `gspo`, `cispo`, `reinforce`, `sapo`, `gmpo`, `dppo-tv`, `dppo-kl`, `clip-cov`, `kl-cov` or `vespo`.
    Unset, it is `gspo` with `sequence_level_importance_ratios`, `cispo` with `use_cispo`, `reinforce` with
    `disable_ppo_ratio`, and `clip` otherwise."""


class AdaptiveKLConfig(Config):
    target: float | None = Field(default=None, gt=0)
    """Mean KL divergence per sampled token to hold by changing `reference_policy_kl_penalty` from step to step
    (arXiv:1909.08593); unset, the penalty is fixed."""
    horizon: int = Field(default=10000, gt=0)
    """Rollouts over which the penalty changes by its own size at most 0.2 times."""


class EntropyBonusConfig(Config):
    weight: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy of the next token's distribution, which is raised; with a target, the first weight."""
    target: float | None = Field(default=None, gt=0)
    """Entropy below which the bonus applies, its weight rising by `weight_step` each step and falling above it
    (Skywork-OR1, arXiv:2505.22312); unset, the weight is fixed."""
    weight_step: float = Field(default=0.005, gt=0)
    """Change of the weight from step to step."""


class RejectionConfig(Config):
    statistic: Statistic = "mean"
    """Over the tokens of a sequence."""
    estimator: KLType = "k3"
    """Per token, with `d = prev - generation`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`."""
    high: float | None = None
    """Sequences with a larger statistic are left out of the policy term; unset, none are."""
    low: float | None = None
    """Sequences with a smaller one are, too; for k1 alone, for k2 and k3 are never negative."""


class LossConfig(NamedConfig):
    """The policy loss of GRPO and its family."""

    name: Literal["policy"] = "policy"
    """`policy`, or the class of another loss: `package.module:Class` or `file.py:Class`."""
    surrogate: SurrogateConfig = SurrogateConfig()
    ratio_denominator: RatioDenominator = "prev"
    """Logprobs that the ratio compares with, around which a surrogate clips: `prev`, those of the policy before the
    step, or `generation`, those of the engine, whatever weights it had. With `prev` and
    `use_importance_sampling_correction` the loss is that of decoupled PPO (arXiv:2505.24298); with `generation` the
    ratio itself corrects for what older weights sampled."""
    ratio_clip_min: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 minus this."""
    ratio_clip_max: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 plus this."""
    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: bound of the loss, in units of -advantage, for tokens with a negative advantage."""
    sequence_level_importance_ratios: bool = False
    """One ratio per sequence, from its mean log-ratio (GSPO); the same as `surrogate: gspo`."""
    use_cispo: bool = False
    """Clip the ratio and stop its gradient, so that every token keeps one (CISPO); the same as `surrogate: cispo`."""
    disable_ppo_ratio: bool = False
    """Take the logprob in place of the ratio (REINFORCE); the same as `surrogate: reinforce`."""
    force_on_policy_ratio: bool | None = None
    """Take the ratio as 1 with its gradient, and spare the pass that computes `prev_logprobs`, which with one minibatch
    a step are the logprobs of the update itself. Unset, it is so if a step has one minibatch and nothing else needs
    `prev_logprobs`."""
    token_level_loss: bool = True
    """Mean over all tokens; otherwise mean over sequences of each sequence's mean."""
    aggregation: AggregationName | None = None
    """`token-mean`, `sequence-mean`, `token-sum` or `sequence-mean-token-sum`. Unset, it is `token-mean`, or
    `sequence-mean` if `token_level_loss` is false. Sequences and tokens that a filter of this section leaves out of
    the sums still count in the denominators; rollouts that failed or were filtered as overlong do not."""
    aggregation_divisor: float | None = Field(default=None, gt=0)
    """Constant that sums over tokens are divided by besides, such as the longest response (Dr. GRPO); 1 if unset."""
    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Weight of the KL divergence to the reference policy; 0 keeps no reference policy."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of the KL divergence. As a term of the loss, k2 has the exact gradient and k3 one that is right near
    the reference only; k1 and k3 have the exact one with `reference_policy_kl_unbiased`, and k1 is refused without."""
    reference_policy_kl_unbiased: bool = False
    """Multiply the estimate by `exp(logp - prev)`, so that its expected gradient is that of the KL divergence
    (arXiv:2506.09477)."""
    use_on_policy_kl_approximation: bool = False
    """Multiply the estimate by `exp(logp - generation)`, for tokens that another policy than the current one drew; with
    `reference_policy_kl_unbiased` it takes the place of `exp(logp - prev)`."""
    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the rewards in place of adding it to the loss: from that of each rollout its sum
    over the sampled tokens. The estimator `reinforce_plus_plus` gives each token the penalties from it on."""
    adaptive_kl: AdaptiveKLConfig = AdaptiveKLConfig()
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    """Bound of the log-ratio that enters the estimator."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    """Bound of the estimate. A token beyond it adds the bound to the loss and nothing to the gradient."""
    use_importance_sampling_correction: bool = False
    """Weigh the policy term by `exp(prev - generation)` logprobs."""
    importance_sampling_level: Level | None = None
    """`token` gives each token its own weight, `sequence` all tokens of a sequence the product of theirs. Unset, it is
    `sequence` for a surrogate with one ratio per sequence and `token` otherwise."""
    importance_sampling_batch_normalize: bool = False
    """Divide the policy term by the sum of the weights in place of the number of tokens or sequences."""
    importance_sampling_rejection: RejectionConfig = RejectionConfig()
    truncated_importance_sampling_type: Truncation = "tis"
    """`tis` bounds the weight, `icepop` leaves out what has a weight outside the bounds, `seq-mask-tis` leaves out
    sequences whose geometric mean weight is outside."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    """Upper bound of the importance weight; unset, it is not bounded."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)
    """Lower bound of the importance weight."""
    staleness_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of the policy term of a token for every version that the weights which sampled it are behind those that
    train: `staleness_decay ** age`, beside the importance weight. The counts that the loss is divided by stay as they
    are, so older rollouts take smaller steps. 1 weighs all ages alike."""
    off_policy_sequence_mask_threshold: float | None = Field(default=None, gt=0)
    """Leave sequences with a negative advantage out of the policy term whose mean `generation - logp` logprob is above
    this (DeepSeek-V3.2)."""
    top_entropy_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the step's sampled tokens that the policy term trains on: those at which the policy's entropy before the
    update is highest (arXiv:2506.01939 takes 0.2). The others still count in the denominators; unset, all train."""
    entropy_bonus: EntropyBonusConfig = EntropyBonusConfig()
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the tokens of rollouts with a reward above 0 (VAPO)."""


class CustomLossConfig(NamedConfig):
    """A loss other than `policy`; the keys beside `name` are the fields of its class."""

    name: str
    """`package.module:Class` or `file.py:Class`."""
