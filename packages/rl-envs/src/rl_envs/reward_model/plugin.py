"""The `reward_model` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.reward_model.config import RewardModelConfig

PLUGIN = EnvironmentPlugin(
    name="reward_model",
    config=RewardModelConfig,
    environment="rl_envs.reward_model.environment:RewardModelEnvironment",
    requirement=Requirement(
        "rl-envs", extras={"cpu": ("reward-model",), "cuda": ("reward-model",)}, imports=("torch", "transformers")
    ),
)
