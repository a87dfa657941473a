"""Settings of the `math` environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.environments.config import EnvironmentConfig

AnswerFormat = Literal["auto", "boxed", "plain", "numeric", "choice"]


class MathConfig(EnvironmentConfig):
    """Compares the answer in a completion with the known one: numbers, expressions, options of a choice."""

    answer_format: AnswerFormat = "auto"
    """Where the answer is read, and how it is compared: `boxed` is the last `\\boxed{}`; `plain` follows the last
    "answer is", "Answer:", "Final:" or `####`, or is the last line; `auto` is boxed if there is a box and plain
    otherwise, and a letter if the known answer is one; `numeric` is as auto, numbers only, compared exactly; `choice`
    is the letter of an option."""
    correct_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward for a right answer."""
    wrong_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward for a wrong answer, or none."""
    format_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Added where an answer is found in the format asked for (`auto`: in a box), right or wrong."""
