"""The `text_tools` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.text_tools.config import TextToolsConfig

PLUGIN = EnvironmentPlugin(
    name="text_tools",
    config=TextToolsConfig,
    environment="rl_envs.text_tools.environment:TextToolsEnvironment",
    requirement=Requirement("rl-envs"),
    tools="rl_envs.text_tools.schemas:tools_of",
    machine_check="rl_envs.text_tools.machine_check:check",
)
