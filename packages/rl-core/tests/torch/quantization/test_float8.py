"""8-bit weights against the format's definition and a float64 oracle."""

import math

import pytest
import torch

from rl_core.torch.quantization.float8 import BLOCK, LARGEST, Float8Recipe, Float8Weight, largest_values, scale_faults

GRANULARITIES = ("per_tensor", "per_channel", "per_block")


def values_of_format() -> list[float]:
    """All values of E4M3 that are not negative, from its definition, in the order of their codes."""
    found = []
    for code in range(0x7F):  # 0x7f is not a number
        exponent, mantissa = code >> 3, code & 7
        found.append(math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7))
    return found


VALUES = torch.tensor(values_of_format(), dtype=torch.float64)


def nearest(quotients: torch.Tensor) -> torch.Tensor:
    """The nearest values of the format, ties to the even code, of magnitudes up to 448."""
    magnitudes = quotients.abs().clamp_max(LARGEST)
    above = torch.searchsorted(VALUES, magnitudes.contiguous()).clamp_max(len(VALUES) - 1)
    below = (above - 1).clamp_min(0)
    to_above, to_below = VALUES[above] - magnitudes, magnitudes - VALUES[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(takes_above, VALUES[above], VALUES[below]) * quotients.sign()


def scales_of(weight: torch.Tensor, granularity: str) -> torch.Tensor:
    """Scales `[rows, columns]` of the definition in float64, by loops."""
    rows, columns = weight.shape
    height, width = {"per_tensor": (rows, columns), "per_channel": (1, columns), "per_block": (BLOCK, BLOCK)}[
        granularity
    ]
    found = torch.empty(rows, columns, dtype=torch.float64)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            part = slice(top, top + height), slice(left, left + width)
            found[part] = weight[part].double().abs().max() / LARGEST
    return found


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many binades, so that small ones reach the subnormals of the format."""
    generator = torch.Generator().manual_seed(rows + columns)
    normal = torch.randn(rows, columns, generator=generator)
    return (normal * torch.exp(3 * torch.randn(rows, columns, generator=generator))).to(dtype)


def test_the_values_are_those_of_the_format():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), VALUES)
    assert VALUES[-1] == LARGEST


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiplies", [False, True])
def test_values_are_the_nearest_to_the_quotients(granularity, shape, dtype, multiplies):
    weight = matrix(*shape, dtype)
    found = Float8Recipe(granularity, multiplies=multiplies).quantise(weight)
    scales = scales_of(weight, granularity)
    expected = nearest(weight.double() / scales)
    # float32 rounds the quotient first, which moves only quotients at the middle of two values
    differs = found.values.double() != expected
    middle = (found.values.double() + expected).abs() / 2
    at_the_middle = ((weight.double() / scales).abs() - middle).abs() <= middle * 2.0**-21
    assert bool((~differs | at_the_middle).all())
    assert differs.double().mean() < 0.02
    torch.testing.assert_close(
        found.dequantise(torch.float64), found.values.double() * scales, rtol=2.0**-22, atol=0, check_dtype=False
    )
    assert found.num_beyond_half_step(weight) == 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_error_is_at_most_16_scales_and_reaches_it(granularity):
    weight = torch.rand(256, 256, generator=torch.Generator().manual_seed(1)) + 0.5
    found = Float8Recipe(granularity).quantise(weight)
    largest = ((found.dequantise(torch.float64) - weight.double()).abs() / scales_of(weight, granularity)).max()
    assert 15 < largest < 16.001
    assert float((found.half_steps() / scales_of(weight, granularity)).max()) < 16.001


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_error_beyond_half_a_step_is_counted(granularity):
    weight = matrix(130, 140)
    found = Float8Recipe(granularity).quantise(weight)
    values = found.values.clone()
    values.view(torch.uint8)[7, 9] ^= 1  # the neighbouring value
    assert Float8Weight(values, found.scales, granularity).num_beyond_half_step(weight) == 1
    values.view(torch.uint8)[7, 9] = 0x7F  # not a number
    assert Float8Weight(values, found.scales, granularity).num_beyond_half_step(weight) == 1
    scales = found.scales.clone()
    scales.view(-1)[0] *= 1.25
    assert Float8Weight(found.values, scales, granularity).num_beyond_half_step(weight) > 10


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_powers_of_two_are_the_next_above(granularity):
    weight = matrix(130, 140)
    weight[0, 0] = 448.0 * 4  # a scale that is a power of two
    plain = Float8Recipe(granularity).quantise(weight)
    rounded = Float8Recipe(granularity, has_power_of_two_scales=True).quantise(weight)
    assert torch.equal(torch.frexp(rounded.scales).mantissa, torch.full_like(rounded.scales, 0.5))
    assert bool(((rounded.scales >= plain.scales) & (rounded.scales < 2 * plain.scales)).all())
    assert rounded.num_beyond_half_step(weight) == 0
    # products with powers of two are exact: quantising what was dequantised changes nothing
    again = Float8Recipe(granularity, has_power_of_two_scales=True).quantise_with(rounded.dequantise(), rounded.scales)
    assert torch.equal(again.values.view(torch.uint8), rounded.values.view(torch.uint8))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_columns_are_dequantised_alike(granularity):
    found = Float8Recipe(granularity).quantise(matrix(200, 300))
    columns = torch.tensor([0, 5, 127, 128, 299])
    assert torch.equal(found.dequantised_columns(columns), found.dequantise()[:, columns])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_have_a_scale_and_stay_zero(granularity):
    weight = torch.zeros(256, 256)
    found = Float8Recipe(granularity).quantise(weight)
    assert bool((found.scales > 0).all())
    assert torch.equal(found.dequantise(), weight)
    assert scale_faults(found.scales, largest_values(weight, granularity)) == []
    assert found.relative_error(weight) == 0.0


def test_a_block_of_zeros_leaves_its_neighbours_alone():
    weight = matrix(256, 256)
    weight[:BLOCK, BLOCK:] = 0
    found = Float8Recipe("per_block").quantise(weight)
    assert torch.equal(found.dequantise()[:BLOCK, BLOCK:], torch.zeros(BLOCK, BLOCK))
    assert found.num_beyond_half_step(weight) == 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_reported(granularity, odd):
    weight = matrix(200, 140)
    weight[3, 4] = odd
    found = Float8Recipe(granularity).quantise(weight)
    faults = scale_faults(found.scales, largest_values(weight, granularity))
    assert faults == [f"1 of {found.scales.numel()} scales are not finite"]
    assert found.num_beyond_half_step(weight) > 0


def test_values_beyond_the_scale_saturate_and_the_scale_is_reported():
    weight = torch.tensor([[1000.0, -1000.0, 3.0]])
    found = Float8Recipe("per_channel").quantise_with(weight, torch.ones(1, 1))
    assert found.values.float().tolist() == [[448.0, -448.0, 3.0]]
    assert found.num_beyond_half_step(weight) == 2
    (fault,) = scale_faults(found.scales, largest_values(weight, "per_channel"))
    assert "too small" in fault


def test_a_scale_of_zero_is_reported_unless_its_weights_are_zero():
    largest = torch.tensor([[1.0], [0.0]])
    assert scale_faults(torch.tensor([[0.0], [0.0]]), largest) == [
        "1 of 2 scales are zero or negative, and their weights are not zero"
    ]


def test_parts_of_a_matrix_are_quantised_as_the_whole():
    weight = matrix(64, 96)
    recipe = Float8Recipe("per_tensor")
    whole = recipe.quantise(weight)
    largest = torch.maximum(*(largest_values(part, "per_tensor") for part in weight.split(48, 1)))
    parts = [recipe.quantise_with(part, recipe.scales(largest)).values for part in weight.split(48, 1)]
    assert torch.equal(torch.cat(parts, 1).view(torch.uint8), whole.values.view(torch.uint8))


def test_the_smallest_scale_is_kept():
    found = Float8Recipe("per_channel", smallest_scale=0.5).quantise(torch.tensor([[1.0], [448.0]]))
    assert found.scales.tolist() == [[0.5], [1.0]]


def test_only_matrices_are_quantised():
    with pytest.raises(ValueError, match=r"matrix.*\(3,\)"):
        Float8Recipe("per_channel").quantise(torch.ones(3))
