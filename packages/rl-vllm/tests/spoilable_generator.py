"""The generator of all tests that start an engine in their own process, which takes one worker extension."""

from __future__ import annotations

from typing import Any

from rl_vllm import VllmGenerator


class SpoilableGenerator(VllmGenerator):
    """Generates with workers that tests can damage."""

    worker_extension = "spoilable_worker.SpoilableWorker"

    async def spoil(self, method: str, *args: object) -> list[Any]:
        """Call a method of `SpoilableWorker` on every rank."""
        return await self._running().call(method, *args)
