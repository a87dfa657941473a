"""The `repository` environment and its dataset, found by their entry points."""

from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement
from rl_envs.repository.config import RepositoryConfig, RepositoryTasksSettings

PLUGIN = EnvironmentPlugin(
    name="repository",
    config=RepositoryConfig,
    environment="rl_envs.repository.environment:RepositoryEnvironment",
    row_check="rl_envs.repository.row_check:check",
    machine_check="rl_envs.repository.machine_check:check",
    runs_agents=True,
    requirement=Requirement("rl-envs"),
)

DATASET = DatasetPlugin(
    name="repository_tasks",
    load="rl_envs.repository.dataset:load",
    requirement=Requirement("rl-envs"),
    settings=RepositoryTasksSettings,
)
