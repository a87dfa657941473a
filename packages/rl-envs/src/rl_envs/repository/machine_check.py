"""Check of this machine for `rl doctor`: whether it offers the sandbox that the settings ask for."""

from __future__ import annotations

from rl_envs.repository.config import RepositoryConfig
from rl_envs.sandbox.sandbox import machine_problem


def check(config: RepositoryConfig) -> str:
    """Return why agents cannot run here, and what to do; an empty string if they can, or run on a server."""
    return "" if config.sandbox.url is not None else machine_problem(config.sandbox)
