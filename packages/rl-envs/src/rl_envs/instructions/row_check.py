"""Check of a row's instructions before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs.instructions.asked import instructions_of
from rl_envs.instructions.config import InstructionsConfig


def check(info: Mapping[str, Any], config: InstructionsConfig) -> None:
    """Raise a `ValueError` if the row has no instructions, or one that cannot be checked."""
    instructions_of(info)
