"""4-bit weights against the definitions of their formats, in float64."""

import pytest
import torch
from quantized_parts import half_steps, read_parts

from rl_core.torch.files.stored import StoredMXFP4
from rl_core.torch.quantization.formats import MAGNITUDES, Int4Format, MXFP4Format, weight_format

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _weight(rows: int = 24, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight[3] *= 100
    weight[5] = 0
    weight[7, :32] = 2.0 ** torch.arange(-10, 6).repeat(2)
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [Int4Format(32), Int4Format(128), MXFP4Format()], ids=lambda fmt: str(fmt))
def test_every_value_is_rounded_to_the_nearest(fmt, dtype):
    weight = _weight(dtype=dtype)
    quantised = fmt.quantise(weight)
    error = (quantised.dequantise(torch.float64) - weight.double()).abs()
    assert bool((error <= half_steps(quantised)).all())
    assert (error / half_steps(quantised)).max() > 0.8


@pytest.mark.parametrize("group_size", [32, 64])
def test_integers_are_those_of_the_definition_in_float64(group_size):
    weight = _weight()
    found = Int4Format(group_size).quantise(weight)
    for row in range(weight.shape[0]):
        for group in range(weight.shape[1] // group_size):
            part = slice(group * group_size, (group + 1) * group_size)
            values = weight[row, part].double()
            scale = (values.abs().max().float() / 7.5).to(torch.bfloat16).double() or torch.tensor(1.0).double()
            assert found.scales[row, group].double() == scale
            assert torch.equal(found.values[row, part].double(), (values / scale).round().clamp(-8, 7))


def test_codes_are_the_nearest_of_all_values_of_the_format():
    weight = _weight()
    found = MXFP4Format().quantise(weight)
    table = torch.tensor(MAGNITUDES, dtype=torch.float64)
    scales = torch.exp2(found.exponents.double() - 127).repeat_interleave(32, 1)
    magnitudes = (weight.double() / scales).abs()
    distances = (magnitudes[..., None] - table).abs()
    nearest = distances.min(2).values
    chosen = distances.gather(2, (found.codes % 8).long()[..., None]).squeeze(2)
    assert torch.equal(chosen, nearest)
    is_tied = (distances == nearest[..., None]).sum(2) > 1
    assert bool((found.codes[is_tied] % 2 == 0).all())
    assert torch.equal(found.codes >= 8, weight.signbit())


def test_exponents_put_the_largest_value_between_half_of_the_range_and_its_last_half_step():
    found = MXFP4Format().quantise(_weight())
    scales = torch.exp2(found.exponents.double() - 127)
    largest = _weight().double().unflatten(1, (-1, 32)).abs().amax(2) / scales
    is_zero = largest == 0
    assert bool(((largest < 7) & ((largest >= 3.5) | is_zero)).all())
    assert bool((found.exponents[is_zero] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_keep_what_they_can_hold(dtype):
    rounded = MXFP4Format().quantise(_weight()).dequantise(torch.float32)
    assert torch.equal(MXFP4Format().quantise(rounded).dequantise(dtype), rounded.to(dtype))


def test_files_hold_eight_integers_in_four_bytes_and_give_them_back():
    found = Int4Format(64).quantise(_weight())
    tensors = found.tensors()
    assert tensors["weight_packed"].shape == (24, 32)
    assert tensors["weight_packed"].dtype == torch.int32
    assert tensors["weight_shape"].tolist() == [24, 256]
    first = int(tensors["weight_packed"][2, 5]) & 0xFFFFFFFF
    assert [((first >> 4 * place) & 15) - 8 for place in range(8)] == found.values[2, 40:48].tolist()
    assert torch.equal(read_parts(tensors).values, found.values)


class Held:
    """A tensor, as files of models hold one."""

    def __init__(self, tensor):
        self.tensor, self.name, self.shape = tensor, "held", tuple(tensor.shape)

    def read(self, slices):
        return self.tensor[slices]


def test_files_hold_two_codes_in_a_byte_as_published_models_do():
    found = MXFP4Format().quantise(_weight())
    tensors = found.tensors()
    assert torch.equal(read_parts(tensors).codes, found.codes)

    blocks = tensors["weight_packed"].unflatten(1, (-1, 16))[None]
    published = StoredMXFP4(Held(blocks), Held(tensors["weight_scale"][None]))
    assert torch.equal(published.read((slice(None),) * 3)[0].T, found.dequantise())


@pytest.mark.parametrize("name", ["int4", "mxfp4", "float8"])
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_broken_value_is_not_hidden(name, broken):
    weight = _weight()
    weight[1, 40] = broken
    rounded = weight_format(name, 64).quantise(weight).dequantise(weight.dtype)
    assert not bool(rounded[1].isfinite().all())
    assert bool(rounded[[0, 2]].isfinite().all())


def test_groups_that_do_not_fill_a_row_are_refused():
    with pytest.raises(ValueError, match="groups of 96 do not fill rows of 256 inputs"):
        Int4Format(96).quantise(_weight())
    with pytest.raises(ValueError, match="a matrix is quantised"):
        MXFP4Format().quantise(torch.zeros(2, 2, 32))
    with pytest.raises(ValueError, match="'nf4' is not a format"):
        weight_format("nf4", 32)
