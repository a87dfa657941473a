"""Check of a row's answer before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs.math.config import MathConfig
from rl_envs.math.known_answer import known_answers


def check(info: Mapping[str, Any], config: MathConfig) -> None:
    """Raise a `ValueError` if the row has no answer that a completion can give."""
    known_answers(info, config.answer_format)
