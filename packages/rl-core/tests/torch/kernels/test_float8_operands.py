"""Operands of float8 products are the nearest values to the quotients by their scales."""

import pytest
import torch

from rl_core.torch.kernels.float8 import E4M3, E5M2, largest_of, product, rounded_columns, rounded_rows, rounded_whole


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    drawn, sizes = (torch.randn(48, 80, generator=generator) for _ in range(2))
    found = (drawn * (2 * sizes).exp()).bfloat16()
    found[3], found[:, 5] = 0.0, 0.0
    return found


def check_nearest(matrix, source, top, bits):
    quotients = source.double() / matrix.scales.double()
    steps = torch.maximum(quotients.abs() * 2.0 ** -(bits + 1), torch.tensor(2.0**-10))
    assert bool(((matrix.values.double() - quotients).abs() <= steps).all())
    assert quotients.abs().max() <= top * (1 + 1e-6)


def test_rows_and_columns_are_scaled_by_powers_of_two(x):
    rows, largest = rounded_rows(x, with_columns=True)
    columns = rounded_columns(x, largest)
    for matrix, source in ((rows, x), (columns, x.T)):
        check_nearest(matrix, source, 448, bits=3)
        assert bool((torch.frexp(matrix.scales).mantissa == 0.5).all())
        used = (source.double() / matrix.scales.double()).abs().amax(1)
        assert bool(((used > 224) | (used == 0)).all())
    assert torch.equal(largest, x.abs().amax(0).float())


@pytest.mark.parametrize(("dtype", "top", "bits"), [(E4M3, 448, 3), (E5M2, 57344, 2)])
def test_a_whole_matrix_is_scaled_by_its_largest_value(x, dtype, top, bits):
    rows, columns = rounded_whole(x, largest_of(x), dtype)
    check_nearest(rows, x, top, bits)
    assert torch.equal(rows.values.T.view(torch.uint8), columns.values.view(torch.uint8))
    assert rows.values.double().abs().max() == top


def test_columns_of_rounded_rows_keep_the_bits_of_values_that_are_not_tiny(x):
    rows, largest = rounded_rows(x, with_columns=True)
    direct, moved = rounded_columns(x, largest), rounded_columns(rows, largest)
    assert torch.equal(direct.scales, moved.scales)
    wide = x.double().abs()
    is_large = (wide >= 2.0**-13 * wide.amax(1, keepdim=True)) & (wide >= 2.0**-13 * wide.amax(0))
    same = direct.values.double() == moved.values.double()
    assert bool((same | ~is_large.T).all())
    assert 0.5 < is_large.double().mean() < 1
    error = (moved.wide().T - rows.wide()).double().abs()
    assert bool((error <= 2.0**-17 * wide.amax(0)).all())


def test_a_value_that_is_not_a_number_reaches_the_product(x):
    x[1, 7] = torch.nan
    rows, _ = rounded_rows(x)
    weight, _ = rounded_rows(torch.ones(16, 80, dtype=torch.bfloat16))
    found = product(rows, weight, torch.bfloat16, emulate=True)
    assert bool(found[1].isnan().all())
    assert not found[[0, 2]].isnan().any()


@pytest.mark.parametrize("scaling", ["rows", "whole"])
def test_the_scaled_product_takes_the_operands_as_they_are(x, scaling):
    weight = x[:32].flip(1)
    if scaling == "rows":
        operands = rounded_rows(x)[0], rounded_rows(weight)[0]
    else:
        operands = tuple(rounded_whole(each, largest_of(each), kind)[0] for each, kind in ((x, E5M2), (weight, E4M3)))
    found, expected = (product(*operands, torch.bfloat16, emulate=emulate) for emulate in (False, True))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))
