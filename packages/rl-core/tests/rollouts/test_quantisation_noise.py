"""The estimate of the noise of quantised weights, against a stack of blocks whose products are quantised."""

import numpy as np
import pytest
import torch

from rl_core.rollouts.delivery import noise_of, quantisation_noise
from rl_core.torch.quantization.float8 import Float8Recipe

RECIPE = Float8Recipe("per_channel")
WIDTH = 256


def stack(num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(num_blocks)
    return [
        (torch.randn(WIDTH, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator))
        for _ in range(num_blocks)
    ]


def stream(blocks: list[tuple[torch.Tensor, torch.Tensor]], *, quantised: bool) -> torch.Tensor:
    """The sum of blocks of two products each, all about equally large."""

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if quantised:
            rows, weight = (RECIPE.quantise(each).dequantise() for each in (rows, weight))
        return rows @ weight.T / WIDTH**0.5

    total = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    for down, up in blocks:
        normed = total / total.std(dim=1, keepdim=True)
        total = total + product(product(normed, down), up)
    return total


@pytest.mark.parametrize("num_blocks", [1, 4, 16, 48])
def test_the_estimate_is_near_the_noise_of_a_stack(num_blocks):
    blocks = stack(num_blocks)
    exact, served = stream(blocks, quantised=False), stream(blocks, quantised=True)
    measured = float((served - exact).norm() / exact.norm())
    errors = [RECIPE.quantise(weight).relative_error(weight) for block in blocks for weight in block]
    estimate = quantisation_noise(float(np.sqrt(np.mean(np.square(errors)))), len(errors))
    assert 0.5 * estimate < measured < 1.5 * estimate


def test_an_engine_that_does_not_quantise_has_no_noise():
    assert noise_of({"weight_version": 3}) == 0.0
    assert noise_of({"quantisation_noise": 0.1}) == 0.1
