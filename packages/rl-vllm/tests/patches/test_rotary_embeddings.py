"""Rotary embeddings on CPU, of queries and keys with heads in a dimension of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig as EngineConfig
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

import rl_vllm.engine_worker

PLACES = torch.arange(5)


@pytest.fixture
def rotary() -> RotaryEmbedding:
    assert rl_vllm.engine_worker.EngineWorker
    with set_current_vllm_config(EngineConfig()):
        return RotaryEmbedding(64, 64, 16, 10000.0, False, torch.float32)


@pytest.fixture
def states() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, 64, generator=generator), torch.randn(5, 1, 64, generator=generator)


def test_vllms_kernel_is_wrong_for_heads_in_a_dimension_of_their_own(
    rotary: RotaryEmbedding, states: tuple[Tensor, Tensor]
) -> None:
    """Once this fails, they need not be flattened any longer."""
    query, key = states
    expected, _ = rotary.forward_native(PLACES, query.clone(), key.clone())
    found = query.clone()
    ops.rotary_embedding(PLACES, found, key.clone(), 64, rotary.cos_sin_cache, False)
    assert not torch.allclose(found, expected, atol=0.1)


def test_heads_in_a_dimension_of_their_own_are_rotated_by_the_position_of_their_token(
    rotary: RotaryEmbedding, states: tuple[Tensor, Tensor]
) -> None:
    query, key = states
    expected, expected_key = rotary.forward_native(PLACES, query.clone(), key.clone())
    found, found_key = rotary.forward_cpu(PLACES, query.clone(), key.clone())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_key, expected_key)
    apart, none = rotary.forward_cpu(PLACES, torch.cat([query, query], -1)[..., :64])
    torch.testing.assert_close(apart, expected)
    assert none is None
    flat, _ = rotary.forward_cpu(PLACES, query.flatten(1), key.flatten(1))
    torch.testing.assert_close(flat, expected.flatten(1))
