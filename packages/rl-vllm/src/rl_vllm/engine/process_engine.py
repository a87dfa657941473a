"""vLLM's engine in its own processes."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.renderers import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_core.errors import GeneratorError
from rl_vllm.engine.engine import Engine, EnginePrompt, failures, generates, one_line
from rl_vllm.engine.engine_output import EngineOutput, ends_of
from rl_vllm.engine.load import Load

SHUTDOWN_S = 10.0
LAST_WORDS_S = 10.0
"""Longest time that a dead engine's processes may take to write the cause."""


class ProcessEngine(Engine):
    """vLLM's asynchronous engine, whose ranks and scheduler are other processes. They end when this one does."""

    def __init__(self, engine: AsyncLLM, roots: Sequence[BaseProcess], output: EngineOutput, load: Load) -> None:
        speculates = engine.vllm_config.speculative_config is not None
        super().__init__(engine.output_processor, load.drafts, speculates=speculates)
        above = [psutil.Process(root.pid) for root in roots]
        self._engine = engine
        self._roots = roots
        self._processes = [process for root in above for process in (root, *root.children(recursive=True))]
        self._output = output
        self._load = load
        self._cause: asyncio.Task[str] | None = None
        self._ids = itertools.count()
        self._generating: set[str] = set()

    @classmethod
    async def start(cls, arguments: AsyncEngineArgs, *, reports_load: bool = False) -> ProcessEngine:
        """Start the engine with its processes.

        Args:
            arguments: Of vLLM.
            reports_load: Have its scheduler send statistics with every step, for `load`, and for `speculation`.

        Raises:
            GeneratorError: With the engine's reason, if it does not come up.
        """
        others = set(multiprocessing.active_children())
        output, load = EngineOutput(), Load()
        try:
            with output.captured():
                engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[load.logger] if reports_load else None)
        except Exception as error:
            cause = await asyncio.to_thread(output.cause, LAST_WORDS_S)
            raise GeneratorError(f"vLLM did not start: {cause or one_line(error)}") from error
        roots = [child for child in multiprocessing.active_children() if child not in others]
        started = cls(engine, roots, output, load)
        try:
            await started.call("end_with_parent", os.getpid())
        except GeneratorError:
            await started.end()
            raise
        return started

    @property
    def load(self) -> Mapping[str, float]:
        return self._load.newest

    @property
    def renderer(self) -> BaseRenderer:
        return self._engine.renderer

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._engine.vllm_config.cache_config.enable_prefix_caching)

    async def run(self, prompt: EnginePrompt, params: VllmSamplingParams) -> Any:
        given = await asyncio.to_thread(prompt) if callable(prompt) else {"type": "token", **prompt}
        name = str(next(self._ids))
        if generates(params):
            self._generating.add(name)
        try:
            async with self._failures():
                async for output in self._engine.generate(given, params, name, lora_request=self.adapter):
                    if output.finished:
                        return output
        finally:
            self._generating.discard(name)
        raise GeneratorError("the engine ended a request without an answer")

    async def interrupt(self) -> None:
        async with self._failures():
            await self._engine.abort(sorted(self._generating))

    async def call(self, method: str, *args: Any) -> list[Any]:
        async with self._failures():
            return await self._engine.collective_rpc(method, args=args)

    async def sleep(self, level: int) -> None:
        async with self._failures():
            await self._engine.sleep(level=level)

    async def wake(self, parts: Sequence[str]) -> None:
        async with self._failures():
            await self._engine.wake_up(list(parts))

    async def reset_prefix_cache(self) -> bool:
        async with self._failures():
            return await self._engine.reset_prefix_cache()

    async def reset_encoder_cache(self) -> None:
        async with self._failures():
            await self._engine.reset_encoder_cache()

    async def check(self) -> None:
        async with self._failures():
            await self._engine.check_health()

    @asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Same as `failures`; a dead engine's with the cause that its processes wrote."""
        try:
            with failures():
                yield
        except GeneratorError as error:
            if not isinstance(error.__cause__, EngineDeadError):
                raise
            if self._cause is None:
                self._cause = asyncio.create_task(asyncio.to_thread(self._find_cause))
            # shielded: other requests wait for it when one is cancelled
            raise GeneratorError(f"{error}: {await asyncio.shield(self._cause)}") from error.__cause__

    def _find_cause(self) -> str:
        cause = self._output.cause(LAST_WORDS_S)
        return cause or ends_of(self._roots) or "its processes reported no cause"

    async def end(self) -> None:
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, SHUTDOWN_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, SHUTDOWN_S)
