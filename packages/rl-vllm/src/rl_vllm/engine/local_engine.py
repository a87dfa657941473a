"""vLLM's engine in a thread of this process, for a replica of one rank."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from rl_core.errors import GeneratorError, RequestRefused
from rl_core.torch.generation.step_thread import StepThread
from rl_vllm.engine.engine import Engine, EnginePrompt, can_be_interrupted, failures, one_line
from rl_vllm.patches.kernel_overrides import skip_odd_namespaces

# An engine may have been here before, or another library that uses numba.
skip_odd_namespaces()


@dataclass(frozen=True)
class LocalRequest:
    """A prompt on its way through the engine, with the future of its answer."""

    prompt: EnginePrompt
    params: VllmSamplingParams
    adapter: LoRARequest | None
    output: Future[Any] = field(default_factory=Future)


class LocalEngine(Engine):
    """vLLM's engine without its own processes: it starts in half the time, and nothing travels to it."""

    def __init__(self, thread: StepThread[SteppedEngine], engine: SteppedEngine) -> None:
        super().__init__(engine.vllm)
        self._thread = thread
        self._engine = engine
        self._submitted: list[LocalRequest] = []

    @classmethod
    async def start(cls, arguments: AsyncEngineArgs, num_threads: int) -> LocalEngine:
        """Start the engine on this number of OpenMP threads.

        Raises:
            GeneratorError: With the engine's reason, if it does not come up.
        """
        loaded: list[SteppedEngine] = []

        def load() -> SteppedEngine:
            loaded.append(SteppedEngine(LLMEngine.from_engine_args(arguments)))
            return loaded[0]

        thread = StepThread(load, num_threads)
        thread.start()
        try:
            await asyncio.wrap_future(thread.loaded)
        except Exception as error:
            raise GeneratorError(f"vLLM did not start: {one_line(error)}") from error
        return cls(thread, loaded[0])

    async def run(self, prompt: EnginePrompt, params: VllmSamplingParams, adapter: LoRARequest | None) -> Any:
        await self.check()
        request = LocalRequest(prompt, params, adapter)
        if not self._submitted:
            # Requests of one turn of the event loop enter together, so that their batch does not depend on timing.
            asyncio.get_running_loop().call_soon(self._flush)
        self._submitted.append(request)
        with failures():
            return await asyncio.wrap_future(request.output)

    async def interrupt(self) -> None:
        self._flush()  # Requests of this turn of the event loop must be in the engine too.
        with failures():
            await asyncio.wrap_future(self._thread.call(self._engine.interrupt))

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with failures():
            return await asyncio.wrap_future(self._thread.call(partial(getattr(self.vllm, method), *args, **kwargs)))

    async def check(self) -> None:
        if self._thread.failure is not None:
            raise GeneratorError(self._thread.failure)

    async def end(self) -> None:
        await asyncio.to_thread(self._thread.close)

    def _flush(self) -> None:
        requests, self._submitted = self._submitted, []
        try:
            self._thread.post(lambda: self._engine.admit(requests))
        except GeneratorError as error:
            for request in requests:
                _fail(request, error)


class SteppedEngine:
    """The engine and the requests it has; touched only in the engine's thread."""

    def __init__(self, vllm: LLMEngine) -> None:
        self.vllm = vllm
        self.dispose = vllm.engine_core.shutdown
        self._ids = itertools.count()
        self._requests: dict[str, LocalRequest] = {}
        self._id_of: dict[str, str] = {}

    @property
    def busy(self) -> bool:
        """True if the engine has requests."""
        return bool(self._requests)

    def admit(self, requests: Sequence[LocalRequest]) -> None:
        """Take requests in; if the engine refuses one, only that one fails."""
        for request in requests:
            name = str(next(self._ids))
            try:
                # Images are processed in this thread, so that requests stay in order.
                prompt = request.prompt() if callable(request.prompt) else request.prompt
                internal = self.vllm.add_request(name, prompt, request.params, lora_request=request.adapter)
            except Exception as error:  # noqa: BLE001 - becomes the failure of the request
                is_refused = isinstance(error, RequestRefused)
                _fail(request, error if is_refused else RequestRefused(f"the engine refused a request: {error}"))
                continue
            self._id_of[name], self._requests[name] = internal, request

    def step(self) -> None:
        """Decode a token of every request, and answer requests that end; cancelled ones leave."""
        cancelled = [name for name, request in self._requests.items() if request.output.cancelled()]
        if cancelled:
            self.vllm.abort_request([self._id_of[name] for name in cancelled], internal=True)
            for name in cancelled:
                del self._id_of[name], self._requests[name]
        if not self._requests:
            return
        for output in self.vllm.step():
            if output.finished:
                self._answer(output.request_id, output)

    def interrupt(self) -> None:
        """End requests for tokens in the next step, with the tokens that they have."""
        running = [name for name, request in self._requests.items() if can_be_interrupted(request.params)]
        # `LLMEngine.abort_request` would forget them, and drop their tokens.
        self.vllm.engine_core.abort_requests([self._id_of[name] for name in running])

    def fail(self, reason: str) -> None:
        """Fail all requests."""
        for request in self._requests.values():
            _fail(request, GeneratorError(reason))
        self._requests.clear()

    def _answer(self, name: str, output: Any) -> None:
        del self._id_of[name]
        request = self._requests.pop(name)
        if request.output.set_running_or_notify_cancel():
            request.output.set_result(output)


def _fail(request: LocalRequest, error: Exception) -> None:
    if not request.output.done() and request.output.set_running_or_notify_cancel():
        request.output.set_exception(error)
