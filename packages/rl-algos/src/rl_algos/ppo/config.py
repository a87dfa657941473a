"""Settings of the PPO loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.rollouts.config import PolicyGradientConfig
from rl_core.config import WhenChanged
from rl_core.model_config import ModelConfig


class PPOConfig(PolicyGradientConfig):
    """PPO with a critic: steps, prompts and samples of a step, advantages, validation."""

    section: ClassVar[str] = "ppo"
    also_called: ClassVar[Mapping[str, str]] = {
        **PolicyGradientConfig.also_called,
        "num_iterations": "num_ppo_epochs",
        "ppo_epochs": "num_ppo_epochs",
    }

    num_prompts_per_step: int = Field(default=512, gt=0)
    """Prompts of one step."""
    num_generations_per_prompt: int = Field(default=1, gt=0)
    """Rollouts of each prompt. One is enough: the critic is the baseline."""
    num_ppo_epochs: int = Field(default=1, gt=0)
    """Passes over the rollouts of a step, of the critic and of the policy, each in an order of its own that follows
    from the seed."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic alone trains, until its values are of use to the policy."""
    export_critic: Annotated[bool, WhenChanged.RESUME] = False
    """Write the critic's Hugging Face files into each checkpoint, in `hf_critic`: to start the critic of another run
    from (`value.model_name`), or to score responses with, as a reward model does."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the reward by sampled token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of the policy's advantages: 1 takes the rewards to come as they are, 0 the values of the next states."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """Take `1 - 1 / (alpha length)` as lambda of the policy's advantages, for each rollout by its sampled tokens, and
    0 if that is negative (VAPO, arXiv:2504.05118, with alpha 0.05); unset, it is `gae_lambda`."""
    critic_gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the returns that the critic learns, 1 in VAPO; unset, it is `gae_lambda`."""
    bootstrap_truncated: bool = False
    """Give rollouts that ran into a token limit or the limit of turns the critic's value of their last state for the
    rewards that they would have earned; otherwise such a rollout ends like any other, with the reward that it got."""
    normalize_advantages: bool = True
    """Subtract the mean and divide by the standard deviation, over all sampled tokens of the step."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip the critic's values to this distance from those before the step, so that a step moves them no further
    (the clipped value loss of PPO); null does not clip."""

    @property
    def passes_per_step(self) -> int:
        """Times that a step trains on each of its rollouts."""
        return self.num_ppo_epochs


class PPORoot(ObjectiveRoot, Protocol):
    """The resolved config of a PPO run, as far as PPO reads it."""

    @property
    def ppo(self) -> PPOConfig:
        """Settings of the loop."""
        ...

    @property
    def value(self) -> ModelConfig:
        """The critic."""
        ...
