"""`top_k` in a step of speculative decoding in which no request has draft tokens, on CPU.

- Fault: the filter of `top_k` on CPU takes the maximum over the requests, which fails for none ("max(): Expected
  reduction dim to be specified"). The rejection sampler calls it with the logits of all draft tokens, of which there
  may be none, and the engine dies.
- vLLM 0.32.0, `vllm/v1/sample/ops/topk_topp_sampler.py`, `apply_top_k_only`.
- Upstream: no upstream issue found on 2026-11-27.
- Delete when `tests/patches/test_empty_top_k.py::test_vllms_filter_fails_for_no_logits` fails.
"""

from __future__ import annotations

from functools import wraps

from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler


def filter_no_logits() -> None:
    """Make vLLM's filter of `top_k` on CPU return logits of no tokens as they are."""
    apply = topk_topp_sampler.apply_top_k_only

    @wraps(apply)
    def apply_top_k_only(logits: Tensor, k: Tensor) -> Tensor:
        return apply(logits, k) if len(logits) else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only
