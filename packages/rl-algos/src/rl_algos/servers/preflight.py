"""Checks of the servers of a config, before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rl_algos.servers.config import ServerConfig
from rl_algos.servers.engines import server_of
from rl_core.errors import GeneratorError
from rl_core.model_config import ModelConfig


def problems(section: Mapping[str, Any]) -> list[str]:
    """Return the problems of the servers as text: no answer, or a start without what the run needs."""
    config = ServerConfig.model_validate(dict(section["generation"]["server_cfg"]))
    model = ModelConfig(
        model_name=section["model_name"],
        precision=section["precision"],
        max_total_sequence_length=section["max_total_sequence_length"],
    )

    async def problem(place: int) -> str:
        try:
            server = server_of(config, place, model, vocab_size=1)
        except GeneratorError as error:
            return str(error).removeprefix("policy.")
        try:
            await server.check()
        except GeneratorError as error:
            return f"generation.server_cfg.urls.{place}: {error}"
        finally:
            await server.server.close()
        return ""

    async def all_problems() -> list[str]:
        return await asyncio.gather(*map(problem, range(len(config.urls))))

    return list(dict.fromkeys(filter(None, asyncio.run(all_problems()))))
