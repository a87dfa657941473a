"""Settings of the PPO loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.rollouts.config import PolicyGradientConfig, WeightedAgentConfig, WeightedAgentsConfig
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
    """Number of prompts per step."""
    num_generations_per_prompt: int = Field(default=1, gt=0)
    """Number of rollouts per prompt. One is enough, because the critic is the baseline."""
    num_ppo_epochs: int = Field(default=1, gt=0)
    """Number of passes of the critic and of the policy over the rollouts of a step; each pass has its own order, which
    depends on the seed."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start that train only the critic, until its values are useful to the policy."""
    export_critic: Annotated[bool, WhenChanged.RESUME] = False
    """Write the critic's Hugging Face files to `hf_critic` in each checkpoint. Use them to initialise the critic of
    another run (`value.model_name`), or to score responses as a reward model does."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor of rewards per sampled token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE lambda of the policy's advantages: 1 uses the future rewards, 0 uses the critic's value of the next state."""
    length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """Set the lambda of the policy's advantages to `max(0, 1 - 1 / (alpha length))`, with the length of each rollout in
    sampled tokens (VAPO, arXiv:2504.05118, with alpha 0.05). If unset, it is `gae_lambda`."""
    critic_gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """GAE lambda of the returns that the critic learns (1 in VAPO). If unset, it is `gae_lambda`."""
    bootstrap_truncated: bool = False
    """Add the critic's value of the last state to rollouts that reached a token limit or the limit of turns, as an
    estimate of the rewards that would have followed. Otherwise such a rollout ends with the reward that it received."""
    rewards_by_turn: bool = False
    """Give each turn of a rollout its own reward, at the last token of the turn. Otherwise the last token of the
    rollout has their sum."""
    normalize_advantages: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over all sampled tokens of the step."""
    agents: WeightedAgentsConfig = WeightedAgentsConfig()
    """Settings of single agents by name, if plays have several (players of a game, proposer and solver): `train` and
    `weight`. With `normalize_advantages`, each agent's advantages are normalised by themselves, whether it is listed
    here or not."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip the critic's values to this distance from its values before the step (the clipped value loss of PPO); null
    does not clip."""

    @property
    def passes_per_step(self) -> int:
        """Number of times that a step trains on each of its rollouts."""
        return self.num_ppo_epochs


def learning_agents(config: PPOConfig) -> dict[str, WeightedAgentConfig]:
    """Return the settings of agents by name."""
    return dict(config.agents)


class PPORoot(ObjectiveRoot, Protocol):
    """The resolved config of a PPO run, as far as PPO reads it."""

    ppo: PPOConfig
    """Settings of the loop."""
    value: ModelConfig
    """The critic."""
