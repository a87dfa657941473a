"""vLLM's engine in its own processes."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_core.errors import GeneratorError
from rl_vllm.engine.engine import Engine, EnginePrompt, can_be_interrupted, failures, one_line
from rl_vllm.engine.engine_output import EngineOutput, ends_of
from rl_vllm.engine.nodes import FurtherNodes
from rl_vllm.engine.parallel_engines import ParallelEngines

SHUTDOWN_S = 10.0
LAST_WORDS_S = 10.0
"""Maximum time in seconds for a dead engine's processes to write the cause."""


class ProcessEngine(Engine):
    """vLLM's asynchronous engine, whose ranks and scheduler are other processes. They end when this one does."""

    def __init__(
        self, engine: AsyncLLM, roots: Sequence[BaseProcess], output: EngineOutput, further: FurtherNodes | None = None
    ) -> None:
        super().__init__(engine)
        self._further = further
        count = engine.vllm_config.parallel_config.data_parallel_size
        self._engines = ParallelEngines(count) if count > 1 else None
        above = [psutil.Process(root.pid) for root in roots]
        self._roots = roots
        self._processes = [process for root in above for process in (root, *root.children(recursive=True))]
        self._output = output
        self._cause: asyncio.Task[str] | None = None
        self._ids = itertools.count()
        self._generating: set[str] = set()

    @classmethod
    async def start(cls, arguments: AsyncEngineArgs, further: FurtherNodes | None = None) -> ProcessEngine:
        """Start the engine with its processes.

        Args:
            arguments: Arguments of vLLM.
            further: The other nodes of the replica, with which it ends; None for a replica on one node.

        Raises:
            GeneratorError: With the engine's reason, if it does not come up.
        """
        others = set(multiprocessing.active_children())
        output = EngineOutput()
        try:
            with output.captured():
                if further is not None:
                    before = set(psutil.Process().children())
                    # Ranks would wait for the lost ones, so that the engine would hang.
                    further.watch(lambda: _kill(set(psutil.Process().children()) - before))
                engine = AsyncLLM.from_engine_args(arguments)
        except Exception as error:
            cause = await asyncio.to_thread(output.cause, LAST_WORDS_S)
            if further is not None:
                cause = await asyncio.to_thread(further.failure) or cause
                further.close()
            raise GeneratorError(f"vLLM did not start: {cause or one_line(error)}") from error
        roots = [child for child in multiprocessing.active_children() if child not in others]
        started = cls(engine, roots, output, further)
        try:
            await started.call("end_with_front")
            # Otherwise the first request asks for it, and waits forever if the engine dies meanwhile.
            await started.ask("get_supported_tasks")
        except GeneratorError:
            await started.end()
            raise
        return started

    async def run(self, prompt: EnginePrompt, params: VllmSamplingParams, adapter: LoRARequest | None) -> Any:
        given = await asyncio.to_thread(prompt) if callable(prompt) else {"type": "token", **prompt}
        name = str(next(self._ids))
        if can_be_interrupted(params):
            self._generating.add(name)
        try:
            async with self._failures():
                place = None if self._engines is None else self._engines.choose(name, given["prompt_token_ids"])
                options = {"lora_request": adapter, "data_parallel_rank": place}
                async for output in self.vllm.generate(given, params, name, **options):
                    if output.finished:
                        return output
        finally:
            self._generating.discard(name)
            if self._engines is not None:
                self._engines.leave(name)
        raise GeneratorError("the engine ended a request without an answer")

    async def interrupt(self) -> None:
        # `AsyncLLM.abort` would answer at once, without the tokens that the engine's process holds.
        known = self.vllm.output_processor.external_req_ids
        names = [internal for name in sorted(self._generating) for internal in known.get(name, ())]
        async with self._failures():
            await self.vllm.engine_core.abort_requests_async(names)

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with self._failures():
            return await self._answer(getattr(self.vllm, method)(*args, **kwargs))

    async def call(self, method: str, *args: Any) -> list[Any]:
        if self._engines is None:
            return await super().call(method, *args)
        # `AsyncLLM.collective_rpc` returns the answers of the first of several engines only.
        async with self._failures():
            calls = self.vllm.engine_core.call_utility_all_async("collective_rpc", method, None, args, {})
            answers = await self._answer(calls)
        return [answer for engine in answers for answer in engine]

    async def forget_prefixes(self) -> None:
        await super().forget_prefixes()
        if self._engines is not None:
            self._engines.forget()

    async def check(self) -> None:
        await self.ask("check_health")

    async def end(self) -> None:
        await asyncio.to_thread(self.vllm.shutdown, SHUTDOWN_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, SHUTDOWN_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, SHUTDOWN_S)
        if self._further is not None:
            self._further.close()

    async def _answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer of a call. If the engine dies before, vLLM would never answer, but its task that reads the
        engine's outputs ends.

        Raises:
            EngineDeadError: If the engine is dead.
        """
        answer, reader = asyncio.create_task(call), self.vllm.output_handler
        try:
            await asyncio.wait([answer, *([] if reader is None else [reader])], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise self.vllm.dead_error
        finally:
            answer.cancel()

    @asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Raise failures; see `failures`. The end of the engine contains the cause that its processes wrote."""
        try:
            with failures():
                yield
        except GeneratorError as error:
            if not isinstance(error.__cause__, EngineDeadError):
                raise
            if self._cause is None:
                self._cause = asyncio.create_task(asyncio.to_thread(self._output.cause, LAST_WORDS_S))
            # It is shielded, because other requests wait for it when one is cancelled.
            written = await asyncio.shield(self._cause)
            lost = "" if self._further is None else await asyncio.to_thread(self._further.failure)
            cause = lost or written or ends_of(self._roots)
            raise GeneratorError(f"{error}: {cause or 'its processes reported no cause'}") from error.__cause__


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes with their children."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                each.kill()
