"""vLLM's asynchronous engine, as the generator uses it; every failure of it is a `GeneratorError`."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rl_core.errors import GeneratorError
from rl_core.generation import GenerationRequest, Placement
from rl_core.model_config import ModelConfig
from rl_vllm.config import MAX_TEMPERATURE, MIN_TEMPERATURE, VllmConfig

GIB = 2**30
SHUTDOWN_S = 10.0
CPU_BATCH_TOKENS = 4096


class Engine:
    """A running engine, its processes included.

    Args:
        arguments: what vLLM is started with.

    Raises:
        GeneratorError: with the engine's reason, where it does not come up.
    """

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self._ids = itertools.count()
        others = set(multiprocessing.active_children())
        try:
            self._engine = AsyncLLM.from_engine_args(arguments)
        except (ValueError, RuntimeError, OSError) as error:
            raise GeneratorError(f"vLLM did not start: {error}") from error
        roots = [psutil.Process(child.pid) for child in multiprocessing.active_children() if child not in others]
        self._processes = [process for root in roots for process in (root, *root.children(recursive=True))]

    async def generate(self, request: GenerationRequest, *, max_tokens: int) -> Any:
        """vLLM's `CompletionOutput` of one request."""
        return (await self._run(request.token_ids, sampling_params(request, max_tokens=max_tokens))).outputs[0]

    async def score(self, token_ids: np.ndarray) -> Sequence[float]:
        """Logprobs at temperature 1 of all tokens but the first."""
        return (await self._run(token_ids, scoring_params())).prompt_logprobs.logprobs

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every rank; the answers by rank."""
        with _failures():
            return await self._engine.collective_rpc(method, args=args)

    async def sleep(self, level: int) -> None:
        with _failures():
            await self._engine.sleep(level=level)

    async def wake(self, parts: Sequence[str]) -> None:
        with _failures():
            await self._engine.wake_up(list(parts))

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        with _failures():
            if not await self._engine.reset_prefix_cache():
                raise GeneratorError("the engine kept its prefix cache: requests are in flight")

    async def check(self) -> None:
        """Raise where the engine is dead."""
        with _failures():
            await self._engine.check_health()

    async def end(self) -> None:
        """Shut down and see all processes end."""
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, SHUTDOWN_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, SHUTDOWN_S)

    async def _run(self, token_ids: np.ndarray, params: VllmSamplingParams) -> Any:
        prompt = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        with _failures():
            async for output in self._engine.generate(prompt, params, str(next(self._ids))):
                if output.finished:
                    return output
        raise GeneratorError("the engine ended a request without an answer")


def engine_arguments(
    backend: VllmConfig, model: ModelConfig, placement: Placement, *, max_len: int, eager: bool, extension: str
) -> AsyncEngineArgs:
    """What vLLM is started with."""
    on_cpu = placement.device == "cpu"
    kv_cache_gib = 1.0 if on_cpu and backend.kv_cache_gib is None else backend.kv_cache_gib
    smallest_batch = max(max_len + 1, CPU_BATCH_TOKENS) if on_cpu else None
    return AsyncEngineArgs(
        model=model.model_name,
        tokenizer=model.tokenizer.name,
        dtype=model.precision,
        hf_overrides=dict(model.hf_config_overrides),
        enforce_eager=eager,
        # scoring a row of full length asks for one token more, which is thrown away
        max_model_len=max_len + 1,
        max_num_seqs=backend.max_num_seqs,
        tensor_parallel_size=backend.tensor_parallel_size,
        pipeline_parallel_size=backend.pipeline_parallel_size,
        gpu_memory_utilization=backend.gpu_memory_utilization,
        kv_cache_dtype=backend.kv_cache_dtype,
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        logprobs_mode="processed_logprobs",
        worker_extension_cls=extension,
        enable_sleep_mode=not on_cpu,
        # vLLM 0.32 dies on CPU where the prompt of a request with a seed is read in parts: it takes back
        # the token drawn too early by rewinding the request's generator, which CPU generators cannot
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=backend.max_num_batched_tokens or smallest_batch,
        generation_config="vllm",
        seed=0,
        disable_log_stats=True,
        **backend.vllm_kwargs,
    )


def sampling_params(request: GenerationRequest, *, max_tokens: int) -> VllmSamplingParams:
    """What one request asks of the engine: the sampled tokens' own logprobs, all at the end.

    Raises:
        GeneratorError: for a temperature that vLLM does not sample at.
    """
    sampling = request.sampling
    if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        raise GeneratorError(
            f"vLLM samples at temperature 0 or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {sampling.temperature}"
        )
    return VllmSamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        skip_special_tokens=False,  # a stop string may be a special token's text
        ignore_eos=True,
        detokenize=bool(sampling.stop_strings),
        seed=request.seed % 2**63,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scoring_params() -> VllmSamplingParams:
    """A prompt's own logprobs, which vLLM computes before temperature and filters."""
    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@contextmanager
def _failures() -> Iterator[None]:
    """Failures of the engine, and requests it refuses, as `GeneratorError`."""
    try:
        yield
    except EngineDeadError as error:
        raise GeneratorError("the engine's process died") from error
    except EngineGenerateError as error:
        raise GeneratorError(f"the engine failed in a request: {error.__cause__ or error}") from error
    except (VLLMClientError, GracefulHTTPError) as error:
        raise GeneratorError(f"the engine refused a request: {error}") from error
