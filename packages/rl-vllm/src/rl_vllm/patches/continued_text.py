"""Text of completions that were interrupted, in vLLM's search for stop strings."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

NUM_SAMPLED = "num_sampled"
"""Entry of a request's `extra_args`: how many tokens of its prompt were sampled before the interruption."""


def continue_texts(processor: OutputProcessor) -> None:
    """Have requests for the rest of a completion look for stop strings from where the completion began.

    vLLM itself looks at the tokens of a request alone, and would miss a stop string that an interruption cut in two.
    """
    add = processor.add_request

    def add_continued(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        params = request.sampling_params
        num_sampled = (params.extra_args or {}).get(NUM_SAMPLED, 0) if params is not None else 0
        if num_sampled:
            detokenizer = continued_detokenizer(processor.tokenizer, request, num_sampled)
            processor.request_states[request.request_id].detokenizer = detokenizer

    processor.add_request = add_continued


def continued_detokenizer(tokenizer: Any, request: EngineCoreRequest, num_sampled: int) -> IncrementalDetokenizer:
    """The detokenizer of an uninterrupted request after so many tokens, which counts only tokens that come later."""
    token_ids = request.prompt_token_ids
    assert token_ids is not None, "requests are token ids"
    whole = copy.copy(request)
    whole.prompt_token_ids = token_ids[: len(token_ids) - num_sampled]
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, whole)
    for token in token_ids[len(token_ids) - num_sampled :]:
        detokenizer.update([token], False)
    if isinstance(detokenizer, SlowIncrementalDetokenizer):
        detokenizer.prompt_len += num_sampled
    else:
        detokenizer.token_ids.clear()
    return detokenizer
