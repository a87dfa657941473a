"""Pools of an environment that obeys its conversations, as the tests of this folder need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.pool import EnvironmentPool
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult

OBEDIENT = "pool_environments:Obedient"


class ScaledConfig(EnvironmentConfig):
    scale: float = 1.0
    """A setting that only a class would see."""


def turn(id: Any, completion: str) -> Conversation:
    return Conversation(
        id=str(id), messages=({"role": "user", "content": "?"},), info={"answer": "1"}, completion=completion
    )


@asynccontextmanager
async def pool(
    environment: str = OBEDIENT, config: Any = None, *, workers: int = 1, deadline_s: float = 120.0, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    opened = EnvironmentPool(environment, config, num_workers=workers, deadline_s=deadline_s, **settings)
    try:
        yield opened
    finally:
        await opened.close()


def failures(outcomes: list[StepResult | EnvironmentFailure]) -> list[int]:
    return [index for index, outcome in enumerate(outcomes) if isinstance(outcome, EnvironmentFailure)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)
