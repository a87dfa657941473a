"""The filter of `top_k` on CPU when there are no draft tokens."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler

import rl_vllm.engine_worker

NO_LOGITS, NO_K = torch.empty(0, 8), torch.empty(0, dtype=torch.int32)


def test_no_logits_stay_as_they_are_and_others_are_filtered() -> None:
    assert rl_vllm.engine_worker.EngineWorker
    assert topk_topp_sampler.apply_top_k_top_p(NO_LOGITS, NO_K, None).shape == (0, 8)
    found = topk_topp_sampler.apply_top_k_top_p(torch.arange(8.0)[None], torch.tensor([3]), None)
    assert found.isfinite().tolist() == [[False] * 5 + [True] * 3]


def test_vllms_filter_fails_for_no_logits() -> None:
    """Once this fails, it need not be told of any longer."""
    with pytest.raises(RuntimeError, match="numel"):
        topk_topp_sampler.apply_top_k_only.__wrapped__(NO_LOGITS, NO_K)
