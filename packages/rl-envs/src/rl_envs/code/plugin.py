"""The `code` environment and its dataset, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.code.config import CodeConfig, CodeProblemsSettings

PLUGIN = EnvironmentPlugin(
    name="code",
    config=CodeConfig,
    environment="rl_envs.code.environment:CodeEnvironment",
    row_check="rl_envs.code.row_check:check",
    machine_check="rl_envs.code.machine_check:check",
    requirement=Requirement("rl-envs"),
)

DATASET = DatasetPlugin(
    name="code_problems",
    load="rl_envs.code.dataset:load",
    requirement=Requirement("rl-envs"),
    settings=CodeProblemsSettings,
)
