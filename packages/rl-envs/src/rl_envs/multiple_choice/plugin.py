"""Settings and declaration of the environment `multiple_choice`."""

from __future__ import annotations

from pydantic import Field

from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement


class MultipleChoiceConfig(EnvironmentConfig):
    """Compare the letter that a response chooses with the right one, `answer` of the row: a letter, or several."""

    num_choices: int = Field(default=26, ge=2, le=26)
    """Number of options; a letter beyond them is not an answer."""
    format_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward added if the response chooses an option, right or wrong."""


PLUGIN = EnvironmentPlugin(
    "multiple_choice",
    MultipleChoiceConfig,
    "rl_envs.multiple_choice.environment:MultipleChoiceEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.multiple_choice.environment:right_letters",
)
