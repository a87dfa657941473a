"""A generator whose model runs in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from rl_core.errors import GeneratorError, RequestRefused, WeightSyncError
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import GenerationRequest, PauseMode, Placement, refuse_adapter
from rl_core.rollouts.grammar import TokenGrammars
from rl_core.rollouts.rollout import Completion
from rl_core.tokenizer import Tokenizer
from rl_core.torch.generation.decoder import Adoption, Decoder
from rl_core.torch.generation.row import Row, StopText
from rl_core.torch.generation.step_thread import StepThread
from rl_core.torch.transport import ReceivingEnd
from rl_core.tracing.profiling import Profile, ProfileOrder, ProfileReport
from rl_core.weights import Manifest, Transport

Model = TypeVar("Model", bound=Decoder)
Result = TypeVar("Result")

PARTS = ("weights", "kv_cache")


class LocalGenerator(Generic[Model]):
    """`rl_core.rollouts.generation.Generator` on one device; all methods are called on one event loop.

    A request ends at `sampling.stop_token_ids`, `sampling.stop_strings` or its token limit; the end-of-sequence token
    ends it if the request lists it.

    Args:
        load: Makes the model, in the engine's thread.
        load_tokenizer: Function that loads it from a folder or hub name; called if a request has stop strings
            or a grammar.
        model: Settings of the model.
        placement: The device and the engine's threads.
    """

    num_ranks = 1

    def __init__(
        self,
        load: Callable[[], Model],
        load_tokenizer: Callable[[str], Tokenizer],
        model: ModelConfig,
        placement: Placement,
    ) -> None:
        self._model_config = model
        self._receiving = ReceivingEnd(placement.claim(num_ranks=1))
        self._engine = RowEngine(load, placement.cpu_threads)
        self._load_tokenizer = load_tokenizer
        self._serving = asyncio.Event()
        self._serving.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_in_flight = 0
        self._submitted: list[Row] = []
        self._adoption: Adoption | None = None
        self._manifest: Manifest | None = None
        self._failure: str | None = None
        self._asleep: set[str] = set()
        self._profile = Profile()

    async def start(self) -> None:
        """Load the model."""
        self._engine.start()
        await asyncio.wrap_future(self._engine.loaded)
        self._vocab_size = self._engine.model.vocab_size

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return one completion, decoded together with concurrent calls.

        Raises:
            GeneratorError: If the engine is dead, asleep or has no whole weights.
            RequestRefused: If the prompt is empty, has tokens outside the vocabulary or leaves no room for a token.
        """
        while not self._serving.is_set():  # A pause may follow before a request that was woken continues.
            await self._serving.wait()
        self._check_ready(PARTS)
        refuse_adapter(request)
        self._check_tokens(request.token_ids)
        room = self._model_config.max_total_sequence_length - len(request.token_ids)
        if room < 1:
            raise RequestRefused(f"a prompt of {len(request.token_ids)} tokens leaves no room for a completion")
        sampling = request.sampling
        prompt, sampled = np.split(request.token_ids, [len(request.token_ids) - request.num_sampled])
        stop_text, grammar = None, None
        if sampling.stop_strings:
            stop_text = StopText(self._tokenizer, sampling.stop_strings, prompt)
            for token in sampled.tolist():
                stop_text.append(token)
        if sampling.grammar:
            try:
                grammar = self._grammars.begin(sampling.grammar, sampling.stop_token_ids)
                for token in sampled.tolist():
                    grammar.accept(token)
            except ValueError as error:
                raise RequestRefused(str(error)) from error
        row = Row(request, min(sampling.max_new_tokens, room), stop_text, grammar)
        self._num_in_flight += 1
        self._idle.clear()
        try:
            # The rows of one turn of the event loop go together, so that their batch does not depend on timing.
            if not self._submitted:
                asyncio.get_running_loop().call_soon(self._flush)
            self._submitted.append(row)
            return await asyncio.wrap_future(row.future)
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load_tokenizer(self._model_config.tokenizer.name or self._model_config.model_name)

    @cached_property
    def _grammars(self) -> TokenGrammars:
        return TokenGrammars(self._tokenizer)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[tokens]`, logprobs at temperature 1, the first 0; answers while paused too."""
        self._check_ready(("weights",))
        self._check_tokens(token_ids)
        return await self._call(lambda: self._engine.model.score(token_ids))

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Hold back new requests, and wait for requests in flight or, with `interrupt`, end them as they are."""
        self._serving.clear()
        if mode == "interrupt" and self._num_in_flight:
            self._flush()  # Requests of this turn of the event loop are in flight too.
            await self._call(self._engine.interrupt)
        await self._idle.wait()

    async def resume(self) -> None:
        """Serve again."""
        self._serving.set()

    async def sleep(self) -> bool:
        """Move the weights to host memory (on CPU they are there already), keep them there, and refuse requests until
        `wake`.
        """
        if self._num_in_flight:
            raise GeneratorError(f"{self._num_in_flight} requests in flight: pause before sleep")
        self._asleep.update(PARTS)
        await self._call(self._engine.model.offload)
        return True

    async def wake(self, parts: Sequence[str] = PARTS) -> None:
        """Bring these parts back; the KV cache takes memory as requests come."""
        unknown = sorted(set(parts) - set(PARTS))
        if unknown:
            raise ValueError(f"a generator wakes {' and '.join(PARTS)}, got {', '.join(unknown)}")
        if "weights" in parts and "weights" in self._asleep:
            await self._call(self._engine.model.onload)
        self._asleep.difference_update(parts)

    async def begin(self, manifest: Manifest) -> None:
        """Make ready for these weights; nothing is served from here until they are committed."""
        if self._num_in_flight:
            raise WeightSyncError(f"{self._num_in_flight} requests in flight: pause before a weight sync")
        if "weights" in self._asleep:
            raise WeightSyncError("the weights are asleep: wake them before a weight sync")
        self._failure = f"weight version {manifest.version} did not become whole"
        self._adoption = None
        self._manifest = manifest
        self._adoption = await self._call(lambda: self._engine.model.adoption(manifest))

    async def receive(self, transport: Transport, first_rank: int) -> Sequence[str]:
        """Take all tensors in as receiver `first_rank`; the digest of all of them."""
        adoption, manifest = self._adoption, self._manifest
        if adoption is None or manifest is None:
            raise WeightSyncError("receive before begin")

        def receive() -> str:
            with self._receiving.transfer(manifest, transport, first_rank) as receiver:
                for name, tensor in receiver:
                    adoption.take(name, tensor)
            return receiver.digest

        return [await self._call(receive)]

    async def commit(self, version: int) -> None:
        """Check what the model computes with, then serve this version."""
        adoption, manifest = self._adoption, self._manifest
        if adoption is None or manifest is None:
            raise WeightSyncError(f"commit of weight version {version} before begin")
        if version != manifest.version:
            raise WeightSyncError(f"commit of weight version {version} after a transfer of {manifest.version}")
        self._adoption = None

        def commit() -> None:
            adoption.verify()
            self._engine.version = version

        await self._call(commit)
        self._failure = None

    async def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record the engine's thread and its process."""
        return await self._call(lambda: self._profile.start(order))

    async def stop_profile(self) -> ProfileReport:
        """End the recording, and write its files."""
        return await self._call(self._profile.stop)

    async def health(self) -> Mapping[str, Any]:
        """Return counts of requests and tokens; answers while the engine decodes."""
        if self._engine.failure is not None:
            raise GeneratorError(self._engine.failure)
        return {
            "num_requests": self._num_in_flight,
            "num_running": self._engine.num_running,
            "num_waiting": len(self._engine.waiting),
            "num_sampled": self._engine.num_sampled,
            "weight_version": self._engine.version,
        }

    async def close(self) -> None:
        """End the engine; requests in flight or held back fail."""
        self._failure = "the generator is closed"
        await asyncio.to_thread(self._engine.close)
        self._receiving.close()
        self._serving.set()

    def _check_ready(self, parts: Sequence[str]) -> None:
        failure = self._engine.failure or self._failure
        if failure is not None:
            raise GeneratorError(failure)
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            raise GeneratorError(f"the generator's {' and '.join(asleep)} sleep: wake them first")

    def _check_tokens(self, token_ids: np.ndarray) -> None:
        if not len(token_ids):
            raise RequestRefused("a request needs at least one token")
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise RequestRefused(f"token ids of a request must be between 0 and {self._vocab_size - 1}")
        limit = self._model_config.max_total_sequence_length
        if len(token_ids) > limit:
            raise RequestRefused(
                f"the request has {len(token_ids)} tokens, more than max_total_sequence_length ({limit})"
            )

    def _flush(self) -> None:
        rows, self._submitted = self._submitted, []
        try:
            self._engine.post(lambda: self._engine.waiting.extend(rows))
        except GeneratorError as error:
            for row in rows:
                row.future.set_exception(error)

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._engine.call(function))


class RowEngine(StepThread[Any], Generic[Model]):
    """Decodes rows in its own thread; everything that touches the model runs there, between two steps.

    Args:
        load: Makes the model, in the thread.
        num_threads: OpenMP threads of the thread.

    Attributes:
        model: The model, once loaded; touched only in the engine's thread.
        version: Weight version that the model computes with.
        num_sampled: Number of tokens sampled so far.
        num_running: Number of rows that are decoded.
        waiting: Requests that have no row in the model yet.
    """

    model: Model

    def __init__(self, load: Callable[[], Model], num_threads: int) -> None:
        def load_model() -> RowEngine[Model]:
            self.model = load()
            self.dispose = self.model.close
            return self

        super().__init__(load_model, num_threads)
        self.waiting: deque[Row] = deque()
        self.version = 0
        self.num_sampled = 0
        self.num_running = 0

    @property
    def busy(self) -> bool:
        """Return whether rows wait or are decoded."""
        return bool(self.model.rows or self.waiting)

    def step(self) -> None:
        """Take waiting rows in, and decode a token of each row; in the thread."""
        self.model.drop_cancelled()
        self.num_sampled += self.model.admit(self.waiting, self.version)
        if self.model.rows:
            self.num_running = len(self.model.rows)
            self.num_sampled += self.model.step(self.version)
        self.num_running = len(self.model.rows)

    def interrupt(self) -> None:
        """End all rows with the tokens that they have; in the thread."""
        for row in self._take_out_all():
            row.end("abort")

    def fail(self, reason: str) -> None:
        """Fail all rows; in the thread."""
        for row in self._take_out_all():
            if not row.future.done() and row.future.set_running_or_notify_cancel():
                row.future.set_exception(GeneratorError(reason))

    def _take_out_all(self) -> list[Row]:
        self.num_running = 0
        rows = [*self.model.clear(), *self.waiting]
        self.waiting.clear()
        return rows
