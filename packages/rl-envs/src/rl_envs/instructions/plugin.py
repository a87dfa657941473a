"""Settings and declaration of the environment `instructions`."""

from __future__ import annotations

from typing import Literal

from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement


class InstructionsConfig(EnvironmentConfig):
    """Check a response against the row's instructions, `instruction_id_list` and `kwargs` as in IFEval."""

    reward: Literal["all", "share"] = "all"
    """Reward of a response: `all` is 1 if every instruction is followed; `share` is the fraction that is followed."""


PLUGIN = EnvironmentPlugin(
    "instructions",
    InstructionsConfig,
    "rl_envs.instructions.environment:InstructionsEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.instructions.environment:check_row",
)
