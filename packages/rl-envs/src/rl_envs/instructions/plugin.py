"""The `instructions` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.instructions.config import InstructionsConfig

PLUGIN = EnvironmentPlugin(
    name="instructions",
    config=InstructionsConfig,
    environment="rl_envs.instructions.environment:InstructionsEnvironment",
    row_check="rl_envs.instructions.row_check:check",
    requirement=Requirement("rl-envs"),
)
