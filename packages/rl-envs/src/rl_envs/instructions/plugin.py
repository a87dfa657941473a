"""The `instructions` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.instructions.config import InstructionsConfig

PLUGIN = EnvironmentPlugin(
    name="instructions",
    config=InstructionsConfig,
    environment="rl_envs.instructions.environment:InstructionsEnvironment",
    requirement=Requirement("rl-envs"),
)
