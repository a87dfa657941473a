"""Sampling parameters of draft tokens on CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

import rl_vllm.engine_worker

CU_NUM_TOKENS = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([0.7, 1.5, -1.0]), torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0])),
        (torch.tensor([5, 6, -1], dtype=torch.int32), torch.tensor([5, 5, 1, 1, 1], dtype=torch.int32)),
    ],
    ids=["temperatures", "top_k"],
)
def test_each_draft_token_has_the_value_of_its_request(values: Tensor, expected: Tensor) -> None:
    assert rl_vllm.engine_worker.EngineWorker
    found = rejection_sampler.expand_batch_to_tokens(values, CU_NUM_TOKENS, 5, replace_from=-1, replace_to=1)
    assert found.dtype == values.dtype
    assert torch.equal(found, expected)


def test_vllms_fallback_leaves_the_output_as_it_was() -> None:
    """Once this fails, it need not be replaced any longer."""
    output = torch.full((5,), 123.0)
    cpu_triton_utils._expand_kernel_impl(output, torch.tensor([0.7, 1.5, 0.9]), CU_NUM_TOKENS, -1, 1)
    assert (output == 123.0).all()
