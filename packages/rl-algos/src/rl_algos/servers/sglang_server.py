"""SGLang's HTTP server (0.5.23 or newer): its native endpoints, which take and return tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rl_algos.servers.engine_server import EngineServer, SampledTokens
from rl_core.errors import GeneratorError
from rl_core.rollouts.generation import GenerationRequest

_log = logging.getLogger(__name__)

GENERATE = "/generate"


class SglangServer(EngineServer):
    """A server that was started by `sglang.launch_server`.

    Its logprobs are over all tokens, after the temperature. Seeds count only with `--enable-deterministic-inference`.
    """

    how_to_start: ClassVar[str] = "python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference"

    _num_healthy = 0

    async def check(self) -> None:
        """See `EngineServer`."""
        found = await self.asked("GET", "/server_info")
        await self.version()
        longest, precision = self._model.max_total_sequence_length, self._model.precision
        if found.get("dtype") not in ("auto", precision):
            raise GeneratorError(
                f"{self} has dtype={str(found.get('dtype'))[:100]}, but policy.precision is {precision}: use --dtype "
                f"{precision}"
            )
        if found.get("quantization") is not None:
            raise GeneratorError(f"{self} has quantised weights: use a model whose weights are not quantised")
        room = found.get("context_length")
        if type(room) is int and room < longest:
            raise GeneratorError(
                f"{self} has context_length={room}, but policy.max_total_sequence_length is {longest}: use "
                f"--context-length {longest}"
            )
        if found.get("enable_deterministic_inference") is not True:
            _log.warning(
                "%s ignores the seeds of requests, so that this run cannot be repeated: start it with "
                "--enable-deterministic-inference",
                self,
            )

    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """See `EngineServer`. SGLang lets requests of others finish first."""
        order = {"model_path": folder, "weight_version": version, "flush_cache": True}
        answer = await self.asked("POST", "/update_weights_from_disk", order, timeout_s=None)
        if answer.get("success") is not True:
            raise GeneratorError(f"{self} did not load {folder}: {str(answer.get('message'))[:300]}")

    async def version(self) -> str:
        """See `EngineServer`."""
        found = await self.asked("GET", "/model_info")
        if "weight_version" not in found:
            raise GeneratorError(f"{self} does not report its weight version. Use SGLang 0.5.23 or newer")
        return str(found["weight_version"])

    async def generate(self, name: str, request: GenerationRequest, max_tokens: int) -> SampledTokens:
        """See `EngineServer`. A server that ends completions at tokens also ends them where the model's own would; what
        the run does not end there is continued."""
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: frozenset[str] = frozenset()
        while True:
            rest = replace(
                request,
                token_ids=np.concatenate([request.token_ids, np.array(tokens, dtype=np.int32)]),
                num_sampled=request.num_sampled + len(tokens),
            )
            found, matched = await self._part(name, rest, max_tokens - len(tokens))
            tokens, logprobs = [*tokens, *found.token_ids], [*logprobs, *found.logprobs]
            versions |= found.versions
            is_foreign_end = type(matched) is int and matched not in request.sampling.stop_token_ids
            if not (is_foreign_end and found.token_ids) or request.sampling.grammar:
                return SampledTokens(tokens, logprobs, found.stop_reason, versions)
            if len(tokens) >= max_tokens:
                return SampledTokens(tokens, logprobs, "length", versions)

    async def _part(self, name: str, request: GenerationRequest, max_tokens: int) -> tuple[SampledTokens, Any]:
        """Return what one request samples, and the token or string that ended it."""
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop_strings),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            # Otherwise SGLang does not end at `stop_token_ids` either.
            "ignore_eos": not sampling.stop_token_ids,
            "sampling_seed": request.draw_seed,
        }
        if sampling.grammar:
            params["structural_tag"] = sampling.grammar
        meta = await self._generated(request.token_ids.tolist(), params, rid=name)
        try:
            entries = meta["output_token_logprobs"]
            tokens = [entry[1] for entry in entries]
            if not all(type(token) is int for token in tokens):
                raise TypeError
            logprobs = [float(entry[0]) for entry in entries]
            ended = meta["finish_reason"]
            versions = frozenset(str(span["version"]) for span in meta["weight_versions"] or ())
            return SampledTokens(tokens, logprobs, str(ended["type"]), versions), ended.get("matched")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise GeneratorError(f"{self} sent an answer of {GENERATE} that is not a completion") from None

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """See `EngineServer`."""
        params = {"max_new_tokens": 0, "temperature": 1.0}
        meta = await self._generated(list(token_ids), params, logprob_start_len=0)
        try:
            entries = meta["input_token_logprobs"]
            if [entry[1] for entry in entries] != list(token_ids):
                raise ValueError
            return [float(entry[0]) for entry in entries[1:]]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise GeneratorError(f"{self} sent an answer of {GENERATE} without the logprobs of a prompt") from None

    async def _generated(self, token_ids: list[int], params: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the part `meta_info` of an answer."""
        body = {"input_ids": token_ids, "sampling_params": dict(params), "return_logprob": True, **fields}
        meta = (await self.requested(GENERATE, body)).get("meta_info")
        if not isinstance(meta, dict):
            raise GeneratorError(f"{self} sent an answer of {GENERATE} without meta_info")
        return meta

    async def interrupt(self, names: Sequence[str]) -> None:
        """See `EngineServer`."""
        await asyncio.gather(*[self.ask("POST", "/abort_request", {"rid": name}) for name in names])

    async def num_sampled(self) -> int | None:
        """See `EngineServer`. SGLang answers here only if it samples, or samples a token for this."""
        answer = await self.ask("GET", "/health")
        if answer.status != 200:
            raise GeneratorError(f"{self} reports that its engine does not answer (HTTP {answer.status} at /health)")
        self._num_healthy += 1
        return self._num_healthy
