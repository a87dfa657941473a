"""Settings of preference optimisation."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pydantic import Field

from rl_algos.losses.preference import FDivergence
from rl_algos.preference.config import PreferenceConfig, PreferenceRoot
from rl_core.config import Config, NamedConfig


class PreferenceLossConfig(NamedConfig):
    """The loss; the keys next to `name` are its settings."""

    name: str = "dpo"
    """Name of the loss. On pairs: `dpo`, `robust-dpo`, `ipo`, `hinge`, `exo`, `nca`, `bco`, `sppo`, `aot`,
    `aot-unpaired`, `apo-zero`, `apo-down`, `discopop`, and without a reference policy `simpo`, `cpo`, `orpo`. On single
    responses with a label: `kto`, which treats the responses of a pair as a good and a bad one. Or your own class:
    `package.module:Class` or `file.py:Class`."""


class AddedLossConfig(Config):
    """A further loss of pairs; the other keys are its settings."""

    weight: float = Field(gt=0, allow_inf_nan=False)
    """Weight of the loss."""
    average_log_probs: bool = False
    """Average logprobs over the tokens of a response; otherwise they are summed."""


class AddedLosses(Config):
    """Further losses of the same pairs by name, each with its `weight` and settings; their sum with `loss` is learned,
    as in MPO. They have the same beta, and must use a reference policy."""

    named: ClassVar[type[Config] | None] = AddedLossConfig


class PreferenceObjectiveConfig(Config):
    """Base of the section of an algorithm that learns preferences by a loss of `rl_algos.losses.preference`."""

    loss: PreferenceLossConfig = PreferenceLossConfig()
    reference_policy_kl_penalty: float = Field(default=0.1, gt=0)
    """Weight of the KL divergence to the reference policy (beta), for losses that use a reference policy. The reference
    is the policy before the first step; with LoRA, it is the policy without its adapters."""
    preference_loss_weight: float | None = Field(default=None, ge=0)
    """Weight of the preference term. If unset, 0.1 for `orpo` and 1 for all other losses."""
    preference_average_log_probs: bool = False
    """Average logprobs over the tokens of a response, so that its length does not count; otherwise they are summed.
    `simpo` and `orpo` always average."""
    sft_loss_weight: float | None = Field(default=None, ge=0)
    """Weight of the negative log-likelihood of the chosen response. If unset, 1 for `orpo` and `cpo` and 0 for all
    other losses."""
    sft_average_log_probs: bool | None = None
    """Average that log-likelihood over the tokens of the response. If unset, it is averaged if the preference term
    is."""
    added_losses: AddedLosses = AddedLosses()
    """See `AddedLosses`."""
    f_divergence: FDivergence = "reverse_kl"
    """Divergence from the reference policy that the loss stands for (f-DPO): `reverse_kl`, `forward_kl`,
    `js_divergence` or `alpha_divergence`. Another one than `reverse_kl` needs losses that depend on the difference of
    the two responses only: `dpo`, `robust-dpo`, `ipo`, `hinge`, `exo`, `discopop`."""
    f_divergence_alpha: float = Field(default=0.5, allow_inf_nan=False)
    """Alpha of the alpha divergence; 1 is the reverse KL divergence."""
    ld_alpha: float | None = Field(default=None, ge=0, le=1)
    """Factor of the logprobs of tokens beyond the length of the shorter response of a pair, so that long responses are
    not preferred for their length (LD-DPO): 0 leaves these tokens out, 1 changes nothing. If unset, 1."""
    weigh_by_policy: bool = False
    """Weigh each pair by the probability that the policy gives to both responses, so that data of other models counts
    as if the policy had sampled it (WPO)."""


class DPOConfig(PreferenceConfig, PreferenceObjectiveConfig):
    """Preference optimisation: DPO, IPO, SimPO, ORPO, KTO and others."""

    cache_reference_logprobs: bool = False
    """Cache the reference's logprobs of each row, so that later epochs and validations do not compute them again. The
    cache takes 4 bytes of driver memory per token of the data."""


class DPORoot(PreferenceRoot, Protocol):
    """The resolved config of preference optimisation, as far as it reads it."""

    dpo: DPOConfig
    """Settings of loop and loss."""
