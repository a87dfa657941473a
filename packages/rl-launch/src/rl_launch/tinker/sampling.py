"""Sampling requests: read, computed beside training, and answered."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from pydantic import ValidationError

from rl_core.errors import RequestRefused as RefusedByEngine
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_launch.tinker.checkpoints import Checkpoints
from rl_launch.tinker.client_types import pb, types
from rl_launch.tinker.host import AdapterHost
from rl_launch.tinker.refusal import RequestRefused, not_found
from rl_launch.tinker.store import Store
from rl_launch.tinker.trainer import JSON, PROTOBUF, Trainer, invalid

_log = logging.getLogger(__name__)

MAX_SAMPLES = 1024
"""Maximum number of samples of a request."""

_UNSERVED = {
    "topk_prompt_logprobs": "score the prompt with include_prompt_logprobs instead",
    "topk_sample_logprobs": "sampled tokens have their own logprobs",
    "target_prompt_logprobs": "score prompts that end in the tokens with include_prompt_logprobs instead",
    "prompt_alt_tokens_k": "sample from the beginnings of the prompt instead",
    "record_stability_info": "stable_reinforce is not served",
}
"""Fields of a request that are refused, and what to do instead."""


def read_sample(body: bytes) -> types.SampleRequest:
    """Return a request.

    Raises:
        RequestRefused: If it is malformed, or asks for something that is not served.
    """
    try:
        request = types.SampleRequest.model_validate_json(body)
    except ValidationError as error:
        raise RequestRefused(f"asample: {invalid(error)}") from None
    for name, remedy in _UNSERVED.items():
        if getattr(request, name):
            raise RequestRefused(f"{name} is not served: {remedy}")
    if request.sampling_session_id is None or request.seq_id is None:
        raise RequestRefused("asample needs a sampling_session_id and a seq_id; call create_sampling_session first")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise RequestRefused(f"num_samples must be from 1 to {MAX_SAMPLES}, got {request.num_samples}")
    return request


def prompt_of(request: types.SampleRequest, host: AdapterHost) -> np.ndarray:
    """Return int32 `[tokens]`, the prompt of a request.

    Raises:
        RequestRefused: If it has no tokens, others than tokens, or too many.
    """
    chunks = request.prompt.chunks
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in chunks):
        raise RequestRefused("prompt: only tokens can be sampled from here, no images or audio")
    ids = [token for chunk in chunks for token in cast(types.EncodedTextChunk, chunk).tokens]
    if not 1 <= len(ids) < host.max_length:
        raise RequestRefused(f"prompt has {len(ids)} tokens; 1 to {host.max_length - 1} are allowed")
    if not all(0 <= token < host.vocab_size for token in ids):
        raise RequestRefused(f"prompt has ids outside 0 to {host.vocab_size - 1}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n < len(ids)):
        problem = f"must be from 1 to {len(ids) - 1} and needs prompt_logprobs, got {last_n}"
        raise RequestRefused(f"prompt_logprobs_last_n {problem}")
    return np.asarray(ids, dtype=np.int32)


def sampling_params(
    request: types.SampleRequest, num_prompt: int, max_length: int, ends: Sequence[int]
) -> SamplingParams:
    """Return how to draw.

    Args:
        request: Request.
        num_prompt: Number of tokens of its prompt.
        max_length: Maximum number of tokens of prompt and completion.
        ends: Ids that end a completion, unless the request has stops of its own.

    Raises:
        RequestRefused: If a setting cannot be one.
    """
    given = request.sampling_params
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    ids = tuple(ends) if stop is None else tuple(each for each in stop if isinstance(each, int))
    texts = tuple(each for each in stop or () if isinstance(each, str))
    room = max_length - num_prompt
    if given.max_tokens is not None and given.max_tokens < 1:
        raise RequestRefused(f"sampling_params.max_tokens must be at least 1, got {given.max_tokens}")
    if not math.isfinite(given.temperature) or not math.isfinite(given.top_p) or "" in texts:
        raise RequestRefused("sampling_params: temperature and top_p must be finite, and a stop is not an empty string")
    try:
        return SamplingParams(
            min(given.max_tokens or room, room),
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop_token_ids=ids,
            stop_strings=texts,
        )
    except ValueError as error:
        raise RequestRefused(f"sampling_params: {error}") from None


class Sampling:
    """Computes sampling requests on the event loop.

    Args:
        store: Queue.
        trainer: Has the host.
        checkpoints: Weights of samplers.
        ends: Ids that end a completion, unless a request has stops of its own.
        max_sampling: Maximum number of completions at a time.
        done: Called with the id of each request that has a result.
    """

    def __init__(
        self,
        store: Store,
        trainer: Trainer,
        checkpoints: Checkpoints,
        ends: Sequence[int],
        max_sampling: int,
        done: Callable[[str], None],
    ) -> None:
        self._store, self._trainer, self._checkpoints = store, trainer, checkpoints
        self._ends, self._done = ends, done
        self._room = asyncio.Semaphore(max_sampling)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Continue the requests that waited when the queue was closed."""
        for row in self._store.rows("SELECT id, tenant FROM requests WHERE state = 'pending' AND kind = 'sample'"):
            self.put(row["id"], row["tenant"])

    def put(self, request: str, tenant: str) -> None:
        """Take a request of the store."""
        task = asyncio.create_task(self._answer(request, tenant))
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request, None))

    def cancel(self, request: str) -> None:
        """End a request whose client does not wait any more."""
        if (task := self._tasks.get(request)) is not None:
            task.cancel()
            self._refuse(request, RequestRefused("the request was cancelled"))

    async def close(self) -> None:
        """End all requests; they continue when the queue is opened again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: str, tenant: str) -> None:
        for is_last in (False, True):
            host = self._trainer.host
            try:
                answer, num_sampled = await self._sample(request, tenant, host)
            except RequestRefused as refused:
                self._refuse(request, refused)
                return
            except Exception as error:  # noqa: BLE001 - whatever an engine raises, the host is built again
                cause = f"{type(error).__name__}: {error}"[:500]
                if is_last:
                    self._refuse(request, RequestRefused(f"the server has failed twice: {cause}", category="server"))
                    return
                _log.warning("a sample failed: %s. It is tried again", cause, exc_info=error)
                self._trainer.host_failed(host)
                while self._trainer.is_building(host):
                    await asyncio.sleep(0.05)
            else:
                with self._store.transaction():
                    self._store.finish(request, state="done", media=PROTOBUF, result=answer)
                    self._store.count(tenant, sampled_tokens=num_sampled)
                self._done(request)
                return

    async def _sample(self, request: str, tenant: str, host: AdapterHost) -> tuple[bytes, int]:
        """Return the answer to a request, and the number of its sampled tokens."""
        given = read_sample(self._store.body(request))
        sampler = self._store.row(
            "SELECT * FROM samplers WHERE id = ? AND tenant = ?", given.sampling_session_id, tenant
        )
        if sampler is None:
            raise not_found(f"the sampling session {given.sampling_session_id}")
        ids = prompt_of(given, host)
        params = sampling_params(given, len(ids), host.max_length, self._ends)
        adapter = await asyncio.to_thread(self._checkpoints.adapter, sampler)

        async def one(number: int) -> Completion:
            async with self._room:
                return await host.sample(GenerationRequest(ids, params, _seed(request, given, number)), adapter)

        async def score() -> list[float]:
            async with self._room:
                return await host.score(ids.tolist(), adapter)

        try:
            async with asyncio.TaskGroup() as group:
                scoring = group.create_task(score()) if given.prompt_logprobs else None
                sampled = [group.create_task(one(number)) for number in range(given.num_samples)]
        except ExceptionGroup as failed:
            # All of them come from one engine, so one of them is the cause.
            error = failed.exceptions[0]
            refused = RequestRefused(str(error)) if isinstance(error, RefusedByEngine) else error
            raise refused from None
        answer = pb.SampleResponse()
        for completion in (task.result() for task in sampled):
            sequence = answer.sequences.add()
            is_cut = completion.stop_reason != "stop"
            sequence.stop_reason = pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP
            sequence.tokens = np.asarray(completion.token_ids, dtype=np.int32).tobytes()
            sequence.logprobs = np.asarray(completion.logprobs, dtype=np.float32).tobytes()
        if scoring is not None:
            # The first token has no logprob, and the client reads NaN as none.
            logprobs = np.asarray(scoring.result(), dtype=np.float32)
            logprobs[0] = np.nan
            if given.prompt_logprobs_last_n is not None:
                logprobs[: -given.prompt_logprobs_last_n] = np.nan
            answer.prompt_logprobs = logprobs.tobytes()
        num_sampled = sum(len(task.result().token_ids) for task in sampled)
        return answer.SerializeToString(), num_sampled

    def _refuse(self, request: str, refused: RequestRefused) -> None:
        self._store.finish(request, state="failed", media=JSON, result=refused.body)
        self._done(request)


def _seed(request: str, given: types.SampleRequest, number: int) -> int:
    """Return the seed of one sample: repeatable if the request has a seed, and otherwise its own, but the same if the
    request is computed again."""
    seed = given.sampling_params.seed
    text = f"{request if seed is None else seed} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
