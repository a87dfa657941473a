"""Settings and declaration of the environment `math`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import EnvironmentPlugin, Requirement

AnswerFormat = Literal["auto", "boxed", "plain", "numeric", "choice", "dapo"]


class MathConfig(EnvironmentConfig):
    """Compare the answer in a completion with the known one: a number, an expression, or an option of a choice."""

    answer_format: AnswerFormat = "auto"
    r"""Place of the answer, and the comparison. `boxed` is the last `\boxed{}`. `plain` is in the last `<answer>` tags,
    or follows the last "answer is", "Answer:", "Final:" or `####`, or is the last line. `auto` is boxed if there is a
    box and plain otherwise, and a letter if the known answer is one. `numeric` is auto for answers that are a number as
    a whole, or the last number of a response that marks no answer. `choice` is the letter of an option. `dapo` follows
    the last "Answer:" near the end, and must equal the known answer as a string after both are normalised, as in DAPO's
    verifier."""
    correct_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward for a right answer."""
    wrong_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward for a wrong or missing answer."""
    format_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward added if an answer is found in the requested format (`auto`: in a box), right or wrong."""


PLUGIN = EnvironmentPlugin(
    "math",
    MathConfig,
    "rl_envs.math.environment:MathEnvironment",
    Requirement("rl-envs", imports=("math_verify",)),
    row_check="rl_envs.math.environment:check_row",
)
