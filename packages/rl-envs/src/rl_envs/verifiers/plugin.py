"""Settings and declarations of the environment and the dataset of verifiers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement


class VerifiersConfig(EnvironmentConfig):
    """Play tasks of verifiers by its agents, with `agent: {place: environment}`. The reward is the trace's; the values
    of its rewards and metrics are reported by name."""

    config: dict[str, Any] = {}
    """Configuration of verifiers' environment without its taskset, such as `{agent: {harness: {id: "null"}}}`: `id`,
    `timeout`, `retries`, and the agents by name, each with `harness`, `runtime`, `max_turns` and so on. The default
    harness is a chat with the tools of the task, and the default runtime a local process."""


class VerifiersSettings(Config):
    """Tasks of a taskset of verifiers."""

    id: str
    """Id of the taskset: a module that can be imported, or one of verifiers' own, such as `textarena`."""
    config: dict[str, Any] = {}
    """Configuration of the taskset, such as `{game: WordLadder-v0}`."""
    start: int = Field(default=0, ge=0)
    """Number of tasks to leave out at the beginning, so that splits can have different ones."""
    size: int | None = Field(default=None, gt=0)
    """Maximum number of rows; null for all tasks. A taskset without an end needs it."""


_REQUIREMENT = Requirement("rl-envs", extras={"cpu": ("verifiers",), "cuda": ("verifiers",)}, imports=("verifiers",))

PLUGIN = EnvironmentPlugin(
    "verifiers",
    VerifiersConfig,
    "rl_envs.verifiers.environment:VerifiersEnvironment",
    _REQUIREMENT,
    runs_agents=True,
    brings_agent=True,
)

DATASET = DatasetPlugin("verifiers", "rl_envs.verifiers.dataset:load", _REQUIREMENT, settings=VerifiersSettings)
