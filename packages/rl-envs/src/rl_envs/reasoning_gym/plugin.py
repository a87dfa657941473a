"""The `reasoning_gym` environment and its dataset, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.reasoning_gym.config import ReasoningGymConfig, ReasoningGymSettings

_REQUIREMENT = Requirement(
    "rl-envs", extras={"cpu": ("reasoning-gym",), "cuda": ("reasoning-gym",)}, imports=("reasoning_gym",)
)

PLUGIN = EnvironmentPlugin(
    name="reasoning_gym",
    config=ReasoningGymConfig,
    environment="rl_envs.reasoning_gym.environment:ReasoningGymEnvironment",
    requirement=_REQUIREMENT,
)

DATASET = DatasetPlugin(
    name="reasoning_gym",
    load="rl_envs.reasoning_gym.dataset:load",
    requirement=_REQUIREMENT,
    settings=ReasoningGymSettings,
    tasks="rl_envs.reasoning_gym.tasks:tasks",
)
