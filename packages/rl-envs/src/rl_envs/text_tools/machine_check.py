"""Check of this machine for `rl doctor`: whether it offers the sandbox of the tool `python`."""

from __future__ import annotations

from rl_envs.sandbox.sandbox import machine_problem
from rl_envs.text_tools.config import TextToolsConfig


def check(config: TextToolsConfig) -> str:
    """Return why the tool `python` cannot run here, and what to do; an empty string if it can, or is not offered."""
    return machine_problem(config.sandbox) if "python" in config.tools else ""
