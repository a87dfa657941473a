"""Settings of preference optimisation."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from rl_algos.preference.config import PreferenceConfig, PreferenceRoot
from rl_core.config import NamedConfig


class PreferenceLossConfig(NamedConfig):
    """The loss; the keys next to `name` are its settings."""

    name: str = "dpo"
    """Name of the loss. On pairs: `dpo`, `robust-dpo`, `ipo`, `hinge`, and without a reference policy `simpo`, `cpo`,
    `orpo`. On single responses with a label: `kto`, which treats the responses of a pair as a good and a bad one. Or
    your own class: `package.module:Class` or `file.py:Class`."""


class DPOConfig(PreferenceConfig):
    """Preference optimisation: DPO, IPO, SimPO, ORPO, KTO and others."""

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
    cache_reference_logprobs: bool = False
    """Cache the reference's logprobs of each row, so that later epochs and validations do not compute them again. The
    cache takes 4 bytes of driver memory per token of the data."""


class DPORoot(PreferenceRoot, Protocol):
    """The resolved config of preference optimisation, as far as it reads it."""

    dpo: DPOConfig
    """Settings of loop and loss."""
