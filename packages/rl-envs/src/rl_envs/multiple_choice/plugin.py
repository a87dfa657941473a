"""The `multiple_choice` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.multiple_choice.config import MultipleChoiceConfig

PLUGIN = EnvironmentPlugin(
    name="multiple_choice",
    config=MultipleChoiceConfig,
    environment="rl_envs.multiple_choice.environment:MultipleChoiceEnvironment",
    row_check="rl_envs.multiple_choice.row_check:check",
    requirement=Requirement("rl-envs"),
)
