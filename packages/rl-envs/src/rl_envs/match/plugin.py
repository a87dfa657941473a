"""The `match` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.match.config import MatchConfig

PLUGIN = EnvironmentPlugin(
    name="match",
    config=MatchConfig,
    environment="rl_envs.match.environment:MatchEnvironment",
    row_check="rl_envs.match.row_check:check",
    requirement=Requirement("rl-envs"),
)
