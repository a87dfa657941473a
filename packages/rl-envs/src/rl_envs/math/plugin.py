"""The `math` environment, found by its entry point."""

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.math.config import MathConfig

PLUGIN = EnvironmentPlugin(
    name="math",
    config=MathConfig,
    environment="rl_envs.math.environment:MathEnvironment",
    row_check="rl_envs.math.row_check:check",
    requirement=Requirement("rl-envs", imports=("math_verify",)),
)
