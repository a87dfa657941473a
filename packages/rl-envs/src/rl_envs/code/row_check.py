"""Check of a row's tests before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_envs.code.cases import read_tests
from rl_envs.code.config import CodeConfig


def check(info: Mapping[str, Any], config: CodeConfig) -> None:
    """Raise a `ValueError` if the row has no tests, or tests of another form."""
    read_tests(info, config.max_tests)
