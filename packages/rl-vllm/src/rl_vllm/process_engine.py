"""vLLM's engine in processes of its own."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rl_core.errors import GeneratorError
from rl_vllm.engine import Engine, failures

SHUTDOWN_S = 10.0


class ProcessEngine(Engine):
    """vLLM's asynchronous engine, whose ranks and scheduler are other processes. They end when this one does."""

    def __init__(self, engine: AsyncLLM, processes: Sequence[psutil.Process]) -> None:
        self._engine = engine
        self._processes = processes
        self._ids = itertools.count()

    @classmethod
    async def start(cls, arguments: AsyncEngineArgs) -> ProcessEngine:
        """Start the engine with its processes.

        Raises:
            GeneratorError: with the engine's reason, where it does not come up.
        """
        others = set(multiprocessing.active_children())
        try:
            engine = AsyncLLM.from_engine_args(arguments)
        except (ValueError, RuntimeError, OSError) as error:
            raise GeneratorError(f"vLLM did not start: {error}") from error
        roots = [psutil.Process(child.pid) for child in multiprocessing.active_children() if child not in others]
        started = cls(engine, [process for root in roots for process in (root, *root.children(recursive=True))])
        try:
            await started.call("end_with_front", os.getpid())
        except GeneratorError:
            await started.end()
            raise
        return started

    async def run(self, token_ids: np.ndarray, params: VllmSamplingParams) -> Any:
        prompt = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        with failures():
            async for output in self._engine.generate(prompt, params, str(next(self._ids))):
                if output.finished:
                    return output
        raise GeneratorError("the engine ended a request without an answer")

    async def call(self, method: str, *args: Any) -> list[Any]:
        with failures():
            return await self._engine.collective_rpc(method, args=args)

    async def sleep(self, level: int) -> None:
        with failures():
            await self._engine.sleep(level=level)

    async def wake(self, parts: Sequence[str]) -> None:
        with failures():
            await self._engine.wake_up(list(parts))

    async def reset_prefix_cache(self) -> bool:
        with failures():
            return await self._engine.reset_prefix_cache()

    async def check(self) -> None:
        with failures():
            await self._engine.check_health()

    async def end(self) -> None:
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, SHUTDOWN_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, SHUTDOWN_S)
