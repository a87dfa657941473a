"""Settings that every environment has."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config


class EnvironmentConfig(Config):
    """Base of an environment's settings, `env.<name>`."""

    num_workers: int = Field(default=1, ge=1)
    """Processes that run the environment."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Most seconds of a call; a rollout whose call takes longer fails, and the process that hangs is replaced."""
