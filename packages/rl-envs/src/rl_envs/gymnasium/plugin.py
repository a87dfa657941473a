"""The `gymnasium` environment and its dataset, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.gymnasium.config import GymnasiumConfig, GymnasiumSettings

_REQUIREMENT = Requirement("rl-envs", extras={"cpu": ("gymnasium",), "cuda": ("gymnasium",)}, imports=("gymnasium",))

PLUGIN = EnvironmentPlugin(
    name="gymnasium",
    config=GymnasiumConfig,
    environment="rl_envs.gymnasium.environment:GymnasiumEnvironment",
    requirement=_REQUIREMENT,
)

DATASET = DatasetPlugin(
    name="gymnasium", load="rl_envs.gymnasium.dataset:load", requirement=_REQUIREMENT, settings=GymnasiumSettings
)
