"""The recipes of quantisation here give vLLM's bits."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.quantization.online import fp8
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.quantization.float8 import Float8Recipe
from rl_vllm.weights.quantised_layers import RECIPES

SHAPES = [(256, 384), (192, 136)]


def weights(shape: tuple[int, int]) -> torch.Tensor:
    """bfloat16 values over many binades, with rows and a block of zeros, and of very small values."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    found[:, 128:] *= 1e-7
    found[128:, 128:] = 0
    found[3] = 0
    return found.bfloat16()


def recipe_of(method: str) -> Float8Recipe:
    return RECIPES[getattr(fp8, f"Fp8{method}OnlineLinearMethod")]


def assert_same(recipe: Float8Recipe, weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    found = recipe.quantise(weight)
    assert torch.equal(found.scales, scales.reshape(found.scales.shape))
    assert torch.equal(found.values.view(torch.uint8), values.contiguous().view(torch.uint8))
    assert found.num_beyond_half_step(weight) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_per_channel(shape: tuple[int, int]) -> None:
    weight = weights(shape)
    scales = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
    assert_same(recipe_of("Ptpc"), weight, fp8._fp8_quant_per_channel(weight, scales), scales)


# vLLM compiles its function for each shape
@exhaustive
@pytest.mark.parametrize("shape", SHAPES)
def test_per_block(shape: tuple[int, int]) -> None:
    weight = weights(shape)
    assert_same(recipe_of("PerBlock"), weight, *per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False))


@pytest.mark.parametrize("shape", SHAPES)
def test_per_tensor(shape: tuple[int, int]) -> None:
    weight = weights(shape)
    scale = fp8._fp8_scale(fp8.weight_amax(weight).reshape(1))
    try:
        values, _ = fp8.ops.scaled_fp8_quant(weight, scale=scale)
    except RuntimeError as error:
        pytest.skip(f"vLLM has no kernel for it on this machine: {error}")
    assert_same(recipe_of("PerTensor"), weight, values, scale)
