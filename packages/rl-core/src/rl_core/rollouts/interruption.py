"""Completions that an interruption of their engine ended, continued until they are whole.

A replica that is paused with `interrupt` ends its requests with the tokens that they have. Each is then requested again
with those tokens after its prompt, waits until the replica resumes, and continues with the weights that it serves by
then. Keys and values are computed anew from all tokens, so every token's logprob is computed by one weight version: the
one of its span. An engine that keeps them (`Placement.keeps_cache`) finds them by the version of the first token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion, StopReason, WeightSpan

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
"""`Generator.generate` of a replica."""


async def generate_whole(generate: Generate, request: GenerationRequest) -> Completion:
    """Return one completion, continued after each interruption.

    It ends as a completion that was never interrupted does, with the same limit. If the weights stay as they are, so
    are its tokens at temperature 0. At other temperatures an engine that draws by the place of a token (`hf`,
    `megatron`) repeats the tokens only for the seed; any engine does for the seed and the places of the interruptions.
    """
    partial = PartialCompletion(request)
    while not partial.is_whole:
        partial.add(await generate(partial.rest))
    return partial.completion()


class PartialCompletion:
    """The parts of a completion so far.

    Args:
        request: Request for the whole of it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._parts: list[Completion] = []

    @property
    def num_sampled(self) -> int:
        """Number of tokens so far."""
        return sum(len(part.token_ids) for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is left to be sampled."""
        return bool(self._parts) and (self._parts[-1].stop_reason != "abort" or not self._num_left)

    @property
    def rest(self) -> GenerationRequest:
        """The request for the rest."""
        if not self.num_sampled:
            return self._request
        versions = (span.version for part in self._parts for span in part.spans)
        first = self._request.first_version
        first = next(versions, None) if first is None else first
        return GenerationRequest(
            token_ids=np.concatenate([self._request.token_ids, *(part.token_ids for part in self._parts)]),
            sampling=replace(self._request.sampling, max_new_tokens=self._num_left),
            seed=self._request.seed,
            num_sampled=self._request.num_sampled + self.num_sampled,
            first_version=first,
            images=self._request.images,
        )

    def add(self, part: Completion) -> None:
        """Append the answer to `rest`."""
        self._parts.append(part)

    def completion(self) -> Completion:
        """Return the whole completion; its stop reason is `abort` if it is not whole yet."""
        if len(self._parts) == 1 and self._stop_reason == self._parts[0].stop_reason:
            return self._parts[0]
        # An interruption without other weights after it begins no span.
        spans: list[WeightSpan] = []
        for span in (span for part in self._parts for span in part.spans):
            if spans and spans[-1].version == span.version:
                spans[-1] = WeightSpan(span.version, spans[-1].num_tokens + span.num_tokens)
            else:
                spans.append(span)
        # Of several reports of a token's experts the first stays: it is of the pass that sampled the token after it.
        routing: np.ndarray | None = None
        for later in (part.routed_experts for part in self._parts if part.routed_experts is not None):
            routing = later if routing is None else np.concatenate([routing, later[len(routing) :]])
        return Completion(
            token_ids=np.concatenate([_NO_TOKENS, *(part.token_ids for part in self._parts)]),
            logprobs=np.concatenate([_NO_LOGPROBS, *(part.logprobs for part in self._parts)]),
            stop_reason=self._stop_reason,
            spans=tuple(spans),
            routed_experts=routing,
        )

    @property
    def _num_left(self) -> int:
        return self._request.sampling.max_new_tokens - self.num_sampled

    @property
    def _stop_reason(self) -> StopReason:
        if not self._parts:
            return "abort"
        last = self._parts[-1].stop_reason
        return "length" if last == "abort" and not self._num_left else last


_NO_TOKENS = np.zeros(0, dtype=np.int32)
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)
