"""Settings and declarations of reasoning-gym's environment and dataset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement

AnswerFormat = Literal["tag", "boxed", "plain"]

MAX_SEED = 2**29
"""Upper bound of seeds; a row's own seed stays below 2**32, which is numpy's limit."""


class ReasoningGymConfig(EnvironmentConfig):
    """Score an answer by the scorer of its reasoning-gym task."""

    format_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward added if an answer is found in the format that the dataset asks for, right or wrong."""


class ReasoningGymSettings(Config):
    """Questions that a reasoning-gym task generates."""

    task: str
    """Name of a reasoning-gym task, such as `chain_sum`; `rl data list reasoning_gym` lists them."""
    config: dict[str, Any] = {}
    """Settings of that task; `rl data list reasoning_gym TASK` lists them."""
    size: int = Field(default=1000, gt=0, le=10**7)
    """Number of rows in the split."""
    seed: int = Field(default=0, ge=0, lt=MAX_SEED)
    """Seed of the generated questions."""
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Fraction of all possible questions that are reserved for validation; must be equal for both splits."""
    answer_format: AnswerFormat = "tag"
    r"""Format that the prompt asks for: the answer in `<answer></answer>`, in `\boxed{}`, or without markup."""


_REQUIREMENT = Requirement(
    "rl-envs", extras={"cpu": ("reasoning-gym",), "cuda": ("reasoning-gym",)}, imports=("reasoning_gym",)
)

PLUGIN = EnvironmentPlugin(
    "reasoning_gym", ReasoningGymConfig, "rl_envs.reasoning_gym.environment:ReasoningGymEnvironment", _REQUIREMENT
)

DATASET = DatasetPlugin(
    "reasoning_gym",
    "rl_envs.reasoning_gym.dataset:load",
    _REQUIREMENT,
    settings=ReasoningGymSettings,
    tasks="rl_envs.reasoning_gym.dataset:tasks",
)
