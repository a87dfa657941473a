"""Settings of preference optimisation."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from rl_algos.preference.config import PreferenceConfig, PreferenceRoot
from rl_core.config import NamedConfig


class PreferenceLossConfig(NamedConfig):
    """The loss; the keys beside `name` are its settings."""

    name: str = "dpo"
    """On pairs: `dpo`, `robust-dpo`, `ipo`, `hinge`, and without a reference policy `simpo`, `cpo`, `orpo`. On single
    responses with a label: `kto`, which takes the two of a pair as a good one and a bad one. Or a class of your own:
    `package.module:Class` or `file.py:Class`."""


class DPOConfig(PreferenceConfig):
    """Preference optimisation: DPO, IPO, SimPO, ORPO, KTO and others."""

    loss: PreferenceLossConfig = PreferenceLossConfig()
    reference_policy_kl_penalty: float = Field(default=0.1, gt=0)
    """Beta: weight of the KL divergence to the reference policy, for the losses that have one. The reference is the
    policy before the first step; with LoRA, the policy without its adapters."""
    preference_loss_weight: float | None = Field(default=None, ge=0)
    """Weight of the preference term; 0.1 for `orpo` and 1 for all others if unset."""
    preference_average_log_probs: bool = False
    """Average logprobs over the tokens of a response, so that its length does not count; otherwise they are summed.
    `simpo` and `orpo` always average."""
    sft_loss_weight: float | None = Field(default=None, ge=0)
    """Weight of the negative log-likelihood of the chosen response; 1 for `orpo` and `cpo` and 0 for all others if
    unset."""
    sft_average_log_probs: bool | None = None
    """Average that likelihood over the tokens of the response; as the preference term does if unset."""
    cache_reference_logprobs: bool = False
    """Keep the reference's logprobs of a row once they are read, so that later epochs and validations do not read them
    again; 4 bytes for each token of the data, in the driver's memory."""


class DPORoot(PreferenceRoot, Protocol):
    """The resolved config of preference optimisation, as far as it reads it."""

    @property
    def dpo(self) -> DPOConfig:
        """Settings of loop and loss."""
        ...
