"""Text of completions that were interrupted, in vLLM's search for stop strings.

- Fault: vLLM searches only the tokens of one request for stop strings. The rest of an interrupted completion is another
  request, so a stop string that the interruption cut in two is missed. vLLM does not know that requests continue one
  another; this is a missing feature rather than a defect.
- vLLM 0.32.0, `vllm/v1/engine/detokenizer.py` and `vllm/v1/engine/output_processor.py`.
- Upstream: no upstream issue found on 2026-11-26.
- Delete when `tests/patches/test_continued_text.py::test_vllm_looks_for_stop_strings_only_in_the_tokens_of_a_request`
  fails, or vLLM can be told where a completion began.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

NUM_SAMPLED = "num_sampled"
"""Entry of a request's `extra_args`: number of tokens of its prompt that were sampled before the interruption."""


def continue_texts(processor: OutputProcessor) -> None:
    """Make requests for the rest of a completion search for stop strings from where the completion began."""
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
    """Return the detokenizer of an uninterrupted request after these tokens. It counts only tokens that come later."""
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
