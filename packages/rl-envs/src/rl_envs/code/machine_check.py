"""Check of this machine for `rl doctor`: whether it offers the sandbox that the settings ask for."""

from __future__ import annotations

from rl_envs.code.config import CodeConfig
from rl_envs.sandbox.sandbox import machine_problem


def check(config: CodeConfig) -> str:
    """Return why programs cannot run here, and what to do; an empty string if they can, or run on a server."""
    return "" if config.sandbox.url is not None else machine_problem(config.sandbox)
