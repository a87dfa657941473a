"""A running engine of vLLM, as the generator uses it; every failure of it is a `GeneratorError`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.llm_engine import LLMEngine

from rl_core.errors import GeneratorError, RequestRefused
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.speculation import SpeculationCounts
from rl_core.torch.training.lora import ADAPTER_CONFIG
from rl_vllm.engine.arguments import sampling_params, scoring_params
from rl_vllm.engine.holding_scheduler import receive_held
from rl_vllm.engine.image_inputs import ImageInputs
from rl_vllm.patches.continued_text import continue_texts

FIRST_NAMED = 2**30
"""Number in vLLM of the first adapter that a request names; adapters of weight versions have smaller numbers."""

EnginePrompt = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""vLLM's prompt of a request, or a function that makes it, which takes too long for the event loop."""


class Engine(ABC):
    """An engine that has been started; all methods are called on one event loop.

    Args:
        vllm: Engine of vLLM.

    Attributes:
        adapter: Adapter of requests that name none; set by `use_adapter`.
    """

    def __init__(self, vllm: AsyncLLM | LLMEngine) -> None:
        self.adapter: LoRARequest | None = None
        self._adapter_ids: dict[str, int] = {}
        self.vllm = vllm
        self._reports: dict[int, Mapping[str, Any]] = {}
        self._image_inputs: ImageInputs | None = None
        processor = vllm.output_processor
        process = processor.process_outputs

        def receive(outputs: Sequence[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
            self._reports.update((report["engine"], report) for report in receive_held(processor, outputs))
            return process(outputs, *args, **kwargs)

        processor.process_outputs = receive
        continue_texts(processor)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, including requests in flight."""
        return self._sum("num_sampled")

    @property
    def load(self) -> Mapping[str, float]:
        """The load of the engine, as entries of `Generator.health`; empty before the first step."""
        if not self._reports:
            return {}
        counts = {name: self._sum(name) for name in ("num_running", "num_waiting", "num_preempted")}
        return {**counts, "kv_cache_usage": max(report["kv_cache_usage"] for report in self._reports.values())}

    def speculation(self, break_even: float) -> SpeculationCounts:
        """Return the counts of speculative decoding so far.

        Args:
            break_even: See `SpeculationCounts`.
        """
        drafts = [report["drafts"] for report in self._reports.values()]
        accepted = tuple(map(sum, zip(*(accepted for _, _, accepted in drafts), strict=True)))
        num_drafts, num_tokens = (sum(each[place] for each in drafts) for place in (0, 1))
        return SpeculationCounts(self.num_sampled, self._sum("num_steps"), num_drafts, num_tokens, accepted, break_even)

    def _sum(self, name: str) -> int:
        """Return the sum of a count over the schedulers of the engine; 0 before the first step."""
        return sum(report[name] for report in self._reports.values())

    def use_adapter(self, version: int | None) -> None:
        """Compute later requests with the adapters that were received with a weight version, or with none."""
        # Nothing is read from the path: the worker extension has handed the adapters to every rank.
        name = f"version-{version}"
        self.adapter = None if version is None else LoRARequest(name, version, lora_path=name)

    def adapter_of(self, named: str | None) -> LoRARequest | None:
        """Return the adapter of a request, as vLLM loads it and keeps its keys and values apart from others'.

        Args:
            named: `GenerationRequest.adapter`.

        Raises:
            RequestRefused: If the engine applies none.
        """
        if named is None:
            return self.adapter
        if self.vllm.vllm_config.lora_config is None:
            raise RequestRefused(
                "the request has an adapter, but the engine applies none; set policy.generation.lora_sync=adapter"
            )
        # vLLM dies of an adapter that it does not find.
        if not (Path(named) / ADAPTER_CONFIG).is_file():
            raise RequestRefused(f"there is no adapter at {named}: {ADAPTER_CONFIG} is missing")
        number = self._adapter_ids.setdefault(named, FIRST_NAMED + len(self._adapter_ids))
        return LoRARequest(named, number, lora_path=named)

    def take_images(self, *, image_token: int, max_images: int) -> None:
        """Serve requests with images from now on.

        Args:
            image_token: Id of the tokens that represent an image.
            max_images: Maximum number of images of a request.
        """
        self._image_inputs = ImageInputs(self.vllm.renderer, image_token=image_token, max_images=max_images)

    async def generate(self, request: GenerationRequest, *, max_tokens: int, salt: str | None = None) -> Any:
        """Return vLLM's `CompletionOutput` of one request; concurrent ones are decoded together.

        Args:
            request: Prompt tokens and sampling parameters.
            max_tokens: Maximum number of new tokens, used instead of the request's `max_new_tokens`.
            salt: Keys and values in the prefix cache are used only by requests with the same salt.

        Raises:
            RequestRefused: If the engine does not take the request or its images.
        """
        params = sampling_params(request, max_tokens=max_tokens)
        prompt: EnginePrompt = tokens_prompt(request.token_ids, salt)
        if request.images:
            if self._image_inputs is None:
                raise RequestRefused(
                    f"the request has {len(request.images)} images, but the engine serves a language model only; set "
                    "policy.vision.enabled=true"
                )
            prompt = partial(self._image_inputs.prompt, request.token_ids, request.images, salt)
        elif self._image_inputs is not None:
            self._image_inputs.require_text(request.token_ids)
        return (await self.run(prompt, params, self.adapter_of(request.adapter))).outputs[0]

    async def score(
        self, token_ids: np.ndarray, *, salt: str | None = None, adapter: str | None = None
    ) -> Sequence[float]:
        """Return the logprobs at temperature 1 of all tokens except the first.

        Args:
            token_ids: The tokens.
            salt: As in `generate`.
            adapter: As `GenerationRequest.adapter`.
        """
        output = await self.run(tokens_prompt(token_ids, salt), scoring_params(), self.adapter_of(adapter))
        logprobs: Sequence[float] = output.prompt_logprobs.logprobs
        return logprobs

    def require_prefix_cache(self) -> None:
        """Raise `GeneratorError` if keys and values of requests that have ended are not kept."""
        if not self.vllm.vllm_config.cache_config.enable_prefix_caching:
            raise GeneratorError(
                "the engine keeps no keys and values of interrupted requests, as it has no prefix cache "
                "(vllm_kwargs.enable_prefix_caching, or a model with states); set "
                "async_grpo.recompute_kv_cache_after_weight_updates=true"
            )

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        if not await self.ask("reset_prefix_cache"):
            raise GeneratorError("the engine kept its prefix cache: requests are in flight")

    async def forget_images(self) -> None:
        """Empty the cache of the vision tower's results, if the engine has one."""
        if self._image_inputs is not None:
            await self.ask("reset_encoder_cache")

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every rank; return the answers by rank."""
        return await self.ask("collective_rpc", method, args=args)

    async def sleep(self, level: int) -> None:
        """Free the device."""
        await self.ask("sleep", level)

    async def wake(self, parts: Sequence[str]) -> None:
        """Take device memory for these parts again."""
        await self.ask("wake_up", list(parts))

    @abstractmethod
    async def run(self, prompt: EnginePrompt, params: VllmSamplingParams, adapter: LoRARequest | None) -> Any:
        """Return vLLM's `RequestOutput` of one request. Cancelling the call takes it out of the engine."""

    @abstractmethod
    async def interrupt(self) -> None:
        """End the requests that can be interrupted, with the tokens they have. The others continue, and so may requests
        that are still on their way into the engine.
        """

    @abstractmethod
    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `vllm`, between two steps."""

    @abstractmethod
    async def check(self) -> None:
        """Raise `GeneratorError` if the engine is dead."""

    @abstractmethod
    async def end(self) -> None:
        """End it, and wait until all its processes have ended."""


def tokens_prompt(token_ids: np.ndarray, salt: str | None) -> dict[str, Any]:
    """Return vLLM's prompt of tokens."""
    return {"prompt_token_ids": token_ids.tolist()} | ({} if salt is None else {"cache_salt": salt})


def can_be_interrupted(params: VllmSamplingParams) -> bool:
    """Return whether a request can end with the tokens that it has, so that another request continues it.

    A request for the logprobs of a prompt has no tokens, and vLLM begins a grammar anew in every request.
    """
    return params.prompt_logprobs is None and params.structured_outputs is None


@contextmanager
def failures() -> Iterator[None]:
    """Raise failures of the engine, and requests it refuses, as `GeneratorError`."""
    try:
        yield
    except EngineDeadError as error:
        raise GeneratorError("the engine's process died") from error
    except EngineGenerateError as error:
        raise RequestRefused(f"the engine failed in a request: {one_line(error.__cause__ or error)}") from error
    except (VLLMClientError, GracefulHTTPError) as error:
        raise RequestRefused(f"the engine refused a request: {error}") from error


def one_line(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"
