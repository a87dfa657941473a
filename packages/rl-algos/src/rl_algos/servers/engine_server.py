"""A server of an engine, as the generator calls it. Whatever it answers costs bounded time and memory."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rl_algos.judges.answers import one_line
from rl_core.errors import GeneratorError, RequestRefused
from rl_core.http_client import HTTPAnswer, RemoteServer, ServerUnreachable, WrongAnswer
from rl_core.model_config import ModelConfig, local_hf_config
from rl_core.rollouts.generation import GenerationRequest

TOKEN_BYTES = 512
"""Maximum number of bytes of an answer for each token of a row; vLLM's answers have about 190."""

ANSWER_S = 60.0
"""Timeout in seconds of answers that no model computes."""

BUSY_S = 600.0
"""Timeout in seconds of a request that a server has no room for."""

BUSY = (429, 503)
"""Statuses of such a server."""


class SampledTokens(NamedTuple):
    """The tokens of a completion as a server reports them.

    Attributes:
        token_ids: Token ids.
        logprobs: Logprob of each.
        stop_reason: `stop`, `length` or `abort`.
        versions: Weight versions that sampled them.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    versions: frozenset[str]


class EngineServer(ABC):
    """A server of the policy's model.

    Args:
        url: Its address.
        api_key_env: Environment variable with its key; None for none.
        model: Model that it serves.
        vocab_size: Number of tokens of the model.

    Raises:
        GeneratorError: If the variable is not set.
    """

    how_to_start: ClassVar[str]
    """How the server is started, for messages."""

    def __init__(self, url: str, api_key_env: str | None, model: ModelConfig, vocab_size: int) -> None:
        self._key = "" if api_key_env is None else os.environ.get(api_key_env, "")
        if api_key_env is not None and not self._key:
            raise GeneratorError(
                f"policy.generation.server_cfg.api_key_env: the environment variable {api_key_env} is not set in this "
                "process. Set it before the run starts, on every node"
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        most = 2**20 + TOKEN_BYTES * model.max_total_sequence_length
        self.server = RemoteServer(url, headers, max_answer=most)
        self._model, self._vocab_size = model, vocab_size

    def __str__(self) -> str:
        return str(self.server)

    @property
    def _has_tied_head(self) -> bool:
        """True if the head has the weights of the embedding, by the model's files if they are on this machine."""
        return bool(local_hf_config(self._model).get("tie_word_embeddings"))

    @abstractmethod
    async def check(self) -> None:
        """Raise `GeneratorError` if the server cannot serve this run's policy as it was started."""

    @abstractmethod
    async def load(self, folder: str, version: str, timeout_s: float) -> None:
        """Make the server compute with the weights in a folder, and report them by a version.

        Raises:
            GeneratorError: If it does not.
        """

    @abstractmethod
    async def version(self) -> str:
        """Return the version that the server reports."""

    @abstractmethod
    async def generate(self, name: str, request: GenerationRequest, max_tokens: int) -> SampledTokens:
        """Return a completion.

        Args:
            name: Name of the request, for `interrupt`.
            request: Prompt and sampling parameters.
            max_tokens: Maximum number of new tokens.

        Raises:
            RequestRefused: If the server refuses this request.
            GeneratorError: If the server or its answer is broken.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Return the logprobs at temperature 1 of all tokens except the first. Raises as `generate`."""

    @abstractmethod
    async def interrupt(self, names: Sequence[str]) -> None:
        """End requests with the tokens that they have."""

    @abstractmethod
    async def num_sampled(self) -> int | None:
        """Return a count that grows while the server samples; None if it has none. Raises `GeneratorError` if the
        server is dead."""

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = ANSWER_S
    ) -> HTTPAnswer:
        """Return an answer whatever its status, except statuses of a server that can serve nothing.

        Args:
            method: GET or POST.
            path: Path, with its query.
            body: JSON object.
            timeout_s: Timeout in seconds; None if the caller bounds the time.

        Raises:
            GeneratorError: If there is no answer, or the server redirects or refuses the key.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await (self.server.get(path) if method == "GET" else self.server.post(path, body))
        except TimeoutError:
            raise GeneratorError(f"{self} did not answer {path} within {timeout_s:g} s") from None
        except (ServerUnreachable, WrongAnswer) as error:
            raise GeneratorError(str(error)) from None
        if 300 <= answer.status < 400:
            raise GeneratorError(
                f"{self} redirects (HTTP {answer.status}), which is not followed because the key must not go "
                "elsewhere. Set policy.generation.server_cfg.urls to the address itself"
            )
        if answer.status in (401, 403):
            raise GeneratorError(
                f"{self} refuses {path} (HTTP {answer.status}: {self.said(answer)}). Check "
                f"policy.generation.server_cfg.api_key_env and how the server was started: {self.how_to_start}"
            )
        return answer

    async def asked(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = ANSWER_S
    ) -> dict[str, Any]:
        """Return the JSON object of a successful answer; raises `GeneratorError` otherwise."""
        return self.object_of(await self.ask(method, path, body, timeout_s=timeout_s), path)

    async def requested(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the JSON object that answers a request for tokens. A server without room is asked again.

        Raises:
            RequestRefused: If the server refuses this request.
            GeneratorError: If there is no such answer.
        """
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + BUSY_S, 0.5
        while (answer := await self.ask("POST", path, body, timeout_s=timeout_s)).status in BUSY:
            if loop.time() + pause_s > end:
                raise GeneratorError(f"{self} has had no room for {BUSY_S:.0f} s: {self.said(answer)}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)
        if answer.status in (400, 413, 422):
            raise RequestRefused(f"{self} refuses a request: {self.said(answer)}")
        return self.object_of(answer, path)

    def object_of(self, answer: HTTPAnswer, path: str) -> dict[str, Any]:
        """Return the JSON object of a successful answer; raises `GeneratorError` otherwise."""
        if answer.status == 404:
            raise GeneratorError(f"{self} does not have {path}. Start it with {self.how_to_start}")
        if answer.status != 200:
            raise GeneratorError(f"{self} failed at {path} (HTTP {answer.status}: {self.said(answer)})")
        try:
            return answer.json()
        except WrongAnswer as error:
            raise GeneratorError(f"{self}: {one_line(self._hidden(str(error)))}") from None

    def said(self, answer: HTTPAnswer) -> str:
        """Return the beginning of an answer in one line, without the key, which the server may repeat."""
        return one_line(self._hidden(answer.body[:4096].decode("utf-8", "replace"))) or "no reason"

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "[api_key]") if self._key else text

    def verify(self, request: GenerationRequest, max_tokens: int, found: SampledTokens, *, version: str) -> None:
        """Refuse an answer that cannot be a completion of this request.

        Args:
            request: The request.
            max_tokens: Maximum number of new tokens.
            found: The answer of the server.
            version: Weight version that it has to have.

        Raises:
            GeneratorError: If it cannot be one.
        """
        tokens, sampling = found.token_ids, request.sampling
        strange = [token for token in tokens if not 0 <= token < self._vocab_size]
        least = 0 if found.stop_reason == "abort" else 1
        problem = ""
        if strange:
            problem = f"token id {strange[0]}, outside the policy's vocabulary of {self._vocab_size} tokens"
        elif found.stop_reason not in ("stop", "length", "abort"):
            problem = f"the finish reason {one_line(found.stop_reason)!r}"
        elif len(tokens) != len(found.logprobs):
            problem = f"{len(found.logprobs)} logprobs for {len(tokens)} tokens"
        elif not least <= len(tokens) <= max_tokens:
            problem = f"{len(tokens)} tokens for a request of at most {max_tokens}"
        elif not all(math.isfinite(each) and each < 1e-3 for each in found.logprobs):
            problem = "a logprob that is not one"
        elif (
            found.stop_reason == "stop"
            and not (sampling.stop_strings or sampling.grammar)
            and tokens[-1] not in sampling.stop_token_ids
        ):
            problem = f"a completion that ended at token {tokens[-1]}, which is not a stop token of the request"
        if problem:
            raise GeneratorError(f"{self} answered with {problem}: it does not serve this run's policy")
        if tokens and found.versions != {version}:
            served = ", ".join(sorted(map(one_line, found.versions))) or "none"
            raise GeneratorError(
                f"{self} answered with weight version {served} instead of {version}: it was restarted, or somebody "
                "else has loaded weights. It is left out until it has the run's weights again"
            )


def whole_numbers(value: Any) -> list[int]:
    """Return a list of JSON's whole numbers. Raises `TypeError` for anything else."""
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise TypeError("not a list of whole numbers")
    return value
