"""Settings of online DPO."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pydantic import Field

from rl_algos.dpo.config import PreferenceObjectiveConfig
from rl_algos.preference.comparison import Pairing
from rl_algos.rollouts.config import RolloutConfig, RolloutRoot


class OnlineDPOConfig(RolloutConfig, PreferenceObjectiveConfig):
    """Online DPO: steps, prompts and samples of a step, the loss of its pairs, validation. With a loss that has only a
    likelihood (`loss: cpo`, `preference_loss_weight: 0`), it is best-of-n: the policy learns its best rollouts."""

    section: ClassVar[str] = "online_dpo"

    num_generations_per_prompt: int = Field(default=8, gt=1)
    """Number of rollouts per prompt, which are compared by their rewards."""
    pairing: Pairing = "best-worst"
    """Pairs to form from the rollouts of a prompt: `best-worst` pairs the best with the worst, `all` forms every pair
    whose rewards differ."""
    reference_sync_period: int = Field(default=0, ge=0)
    """Number of steps between updates of the reference policy, which then becomes the policy as it is; 0 keeps the
    initial weights."""


class OnlineDPORoot(RolloutRoot, Protocol):
    """The resolved config of a run of online DPO, as far as it reads it."""

    online_dpo: OnlineDPOConfig
    """Settings of loop and loss."""
