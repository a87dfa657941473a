"""Completions that an interruption of their engine ended, continued until they are whole.

A replica that is paused with `interrupt` ends its requests with the tokens that they have. Each is then requested again
with those tokens after its prompt, waits until the replica resumes, and continues with the weights that it serves by
then. Keys and values are computed anew from all tokens, so every token's logprob is computed by one weight version: the
one of its span. An engine that keeps them (`Placement.keeps_cache`) finds them by the version of the first token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion, WeightSpan

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
"""`Generator.generate` of a replica."""


async def generate_whole(generate: Generate, request: GenerationRequest) -> Completion:
    """Return one completion, continued after each interruption.

    It ends as a completion that was never interrupted does, with the same limit. If the weights stay as they are, so
    are its tokens at temperature 0. At other temperatures an engine that draws by the place of a token (`hf`,
    `megatron`) repeats the tokens only for the seed; any engine does for the seed and the places of the interruptions.
    """
    parts: list[Completion] = []
    num_left = request.sampling.max_new_tokens
    while num_left and (not parts or parts[-1].stop_reason == "abort"):
        parts.append(await generate(request_for_rest(request, parts)))
        num_left -= len(parts[-1].token_ids)
    stop_reason = "length" if parts[-1].stop_reason == "abort" else parts[-1].stop_reason
    whole = joined(parts)
    return replace(whole, stop_reason=stop_reason) if whole.stop_reason != stop_reason else whole


def joined(parts: Sequence[Completion]) -> Completion:
    """Return the completion that consists of these parts, at least one; it ends as the last one does."""
    if len(parts) == 1:
        return parts[0]
    # An interruption without other weights after it begins no span.
    spans: list[WeightSpan] = []
    for span in (span for part in parts for span in part.spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = WeightSpan(span.version, spans[-1].num_tokens + span.num_tokens)
        else:
            spans.append(span)
    # Of several reports of a token's experts the first stays: it is of the pass that sampled the token after it.
    routing: np.ndarray | None = None
    for later in (part.routed_experts for part in parts if part.routed_experts is not None):
        routing = later if routing is None else np.concatenate([routing, later[len(routing) :]])
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        stop_reason=parts[-1].stop_reason,
        spans=tuple(spans),
        routed_experts=routing,
    )


def request_for_rest(request: GenerationRequest, parts: Sequence[Completion]) -> GenerationRequest:
    """Return the request for the tokens after the parts that a completion has so far."""
    num_sampled = sum(len(part.token_ids) for part in parts)
    if not num_sampled:
        return request
    versions = (span.version for part in parts for span in part.spans)
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, *(part.token_ids for part in parts)]),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - num_sampled),
        num_sampled=request.num_sampled + num_sampled,
        first_version=next(versions, None) if request.first_version is None else request.first_version,
    )
