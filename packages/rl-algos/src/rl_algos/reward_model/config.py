"""Settings of reward models."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field

from rl_algos.losses.reward import MarginUse
from rl_algos.preference.config import PreferenceConfig, PreferenceRoot


class RewardModelConfig(PreferenceConfig):
    """A reward model: the policy's architecture with a head of one score in place of the language-model head."""

    loss: Literal["bradley-terry", "regression"] = "bradley-terry"
    """`bradley-terry` learns from pairs that the better response has the higher score; `regression` learns the `score`
    that the data has for each response."""
    margin: MarginUse = "ignore"
    """Use of the margin of a pair: `subtract` asks for a difference of scores above it, `scale` weighs the pair by it.
    The data must then have a `margin`, or scores."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two scores of a pair, which holds scores near 0; 0.01 is usual."""


class RewardModelRoot(PreferenceRoot, Protocol):
    """The resolved config of a reward model, as far as its training reads it."""

    @property
    def rm(self) -> RewardModelConfig:
        """Settings of loop and loss."""
        ...
