"""Settings and declarations of gymnasium's environment and dataset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement

Shown = Literal["rendering", "observation"]


class GymnasiumConfig(EnvironmentConfig):
    """Play a gymnasium environment, one action per turn. A turn's reward is the reward of its action."""

    invalid_reward: float = Field(default=0.0, le=0, allow_inf_nan=False)
    """Reward for a turn without a valid action, which leaves the game unchanged."""
    solved_return: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum sum of the game's own rewards for an ended game to count as solved, for `accuracy`."""


class GymnasiumSettings(Config):
    """Starts of a gymnasium environment whose actions are numbers (`Discrete`) or strings (`Text`)."""

    id: str
    """Id of the environment, such as `FrozenLake-v1`, or `package.module:Id` for an environment that this module
    registers."""
    config: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`, such as `is_slippery: false`. `max_episode_steps` limits the actions of a
    game; grpo.max_rollout_turns must allow as many."""
    actions: list[str] = []
    """Words for the actions of a `Discrete` space, in order; if empty, the numbers of the actions."""
    instructions: str = ""
    """Text before the first observation that explains the game."""
    show: Shown | None = None
    """Form of the game that the policy sees: its `ansi` rendering, with cells of coloured background shown in brackets
    and other colours lost, or its observation as a string. If unset, the rendering if the game has one."""
    size: int = Field(default=1000, gt=0, le=10**6)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0)
    """Seed of the starts."""


_REQUIREMENT = Requirement("rl-envs", extras={"cpu": ("gymnasium",), "cuda": ("gymnasium",)}, imports=("gymnasium",))

PLUGIN = EnvironmentPlugin(
    "gymnasium", GymnasiumConfig, "rl_envs.gymnasium.environment:GymnasiumEnvironment", _REQUIREMENT
)

DATASET = DatasetPlugin("gymnasium", "rl_envs.gymnasium.dataset:load", _REQUIREMENT, settings=GymnasiumSettings)
