"""Sampling of draft tokens on CPU. vLLM 0.32.0 has two faults in it.

Parameters of requests, repeated for each of their draft tokens:

- Fault: the fallback of a Triton kernel writes into a copy of its output unless that is int64, and reads floats as
  integers. Temperatures, `top_k` and `top_p` of draft tokens are therefore whatever the memory held. Speculative
  decoding draws from other logits than the model's and reports other logprobs, without an error.
- vLLM 0.32.0, `vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`, called by
  `vllm/v1/sample/rejection_sampler.py`, `expand_batch_to_tokens`.
- Upstream: https://github.com/vllm-project/vllm/issues/55005 (open) describes both errors.
- Delete when `tests/patches/test_sampling_of_drafts.py::test_vllms_fallback_leaves_the_output_as_it_was` fails.

`top_k` in a step in which no request has draft tokens:

- Fault: the filter of `top_k` takes the maximum over the requests, which fails for none ("max(): Expected reduction dim
  to be specified"). The rejection sampler calls it with the logits of all draft tokens. If there are none, the engine
  dies.
- vLLM 0.32.0, `vllm/v1/sample/ops/topk_topp_sampler.py`, `apply_top_k_only`.
- Upstream: no upstream issue found on 2026-11-27.
- Delete when `tests/patches/test_empty_top_k.py::test_vllms_filter_fails_for_no_logits` fails.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler


def filter_no_logits() -> None:
    """Make vLLM's filter of `top_k` on CPU return logits of no tokens as they are."""
    apply = topk_topp_sampler.apply_top_k_only

    @wraps(apply)
    def apply_top_k_only(logits: Tensor, k: Tensor) -> Tensor:
        return apply(logits, k) if len(logits) else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def repeat_sampling_parameters_on_cpu() -> None:
    """Make vLLM's rejection sampler on CPU repeat parameters without the kernel."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Return the value of each request, once for each of its draft tokens: `[num_tokens]`, of the dtype of `x`.

    Args:
        x: `[requests]`.
        cu_num_tokens: int `[requests]`, number of draft tokens of the requests so far.
        num_tokens: Number of draft tokens of all requests.
        replace_from: A value to replace.
        replace_to: Its replacement.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.long))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
