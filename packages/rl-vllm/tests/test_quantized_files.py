"""Files with quantised linear layers, as vLLM's own library reads and writes them."""

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from rl_core.torch.quantization.files import quantization_config
from rl_core.torch.quantization.formats import weight_format

COMPRESSORS = {
    "int4": PackedQuantizationCompressor,
    "mxfp4": MXFP4PackedCompressor,
    "float8": FloatQuantizationCompressor,
}


@pytest.fixture
def weight():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 256, generator=generator).mul_(0.02).bfloat16()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_library_reads_the_weights_that_training_computes_with(name, weight):
    fmt = weight_format(name, 64)
    quantised = fmt.quantise(weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fmt.scheme()))
    read = COMPRESSORS[name].decompress(dict(quantised.tensors()), scheme)["weight"]
    assert torch.equal(read.bfloat16(), quantised.dequantise(torch.bfloat16))


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_the_library_chooses_the_same_scales(name, weight):
    fmt = weight_format(name, 64)
    args = QuantizationArgs(**fmt.scheme())
    groups = weight.unflatten(1, (-1, fmt.group_size))
    scales, _ = calculate_qparams(groups.amin(2), groups.amax(2), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    written = COMPRESSORS[name].compress({"weight": weight, "weight_scale": scales}, scheme)
    ours = fmt.quantise(weight).tensors()
    assert torch.equal(written["weight_scale"], ours["weight_scale"])
    if name == "mxfp4":  # it divides integers' weights in bfloat16, which rounds some to another integer
        assert torch.equal(written["weight_packed"], ours["weight_packed"])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_library_knows_the_config(name):
    fmt = weight_format(name, 64)
    config = QuantizationConfig.model_validate(quantization_config(fmt, ["lm_head"]))
    (scheme,) = config.config_groups.values()
    assert scheme.weights == QuantizationArgs(**fmt.scheme())
    assert config.ignore == ["lm_head"]
