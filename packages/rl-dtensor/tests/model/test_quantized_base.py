"""Frozen weights in 4 or 8 bits: their numbers, and adapters that train on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.selfcheck import case_on, read_files
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_dtensor.model.layers.quantized_base import NF4, PackedFormat, QuantizedLinear
from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny

SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5})
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PLAIN = LoraConfig(enabled=True, dim=4, alpha=8)
FORMATS = {"nf4": PackedFormat(4), "int8": PackedFormat(8)}

OF_BITSANDBYTES = (
    (
        "79dfe30ea1f0f1ae03efd979dfe30ea1f0f1ae02efda8adfe21e91f0f18e12dfebacefd11e71f0f26f11cfedcdefb12f43e1"
        "e34f20affedeff803f25d1d62f50"
    ),
    [0.02001953125, 3.0],
    (
        "0000533b393ca43c6d3c02bca4bc6d3ca13b64bca43ca4bca43c64bca13b6d3ca4bc02bc6d3ca43c393c533b0000533b393c"
        "a43c6d3c02bca4bc6d3ca13b64bca43ca4bca43c64bca13b6d3ca4bc2cbc6d3ca43c393ca13bd13aa13b393ca43c6d3c2cbc"
        "64bc6d3c533b64bca43ca4bca43c64bcd13a6d3c64bc2cbc393ca43c0b40823f3d3fa93f0b404040d83f06c006c00b400000"
        "06c0404040c04040cabf8cbe404006c006c0a93f40400b40d83fa93fd83f0b404040823f06c0cabf40405abf98bf0b4006c0"
        "0b4098bf5abf4040cabf40c03d3f404040400b40d83f0b4040404040743e40c098bf4040cabf0ebfd83f06c0d83f8cbecabf"
        "40400ebf40c0"
    ),
)
"""Codes, largest values and values in bfloat16 of `ramp()`, by `quantize_4bit(weight, blocksize=64, quant_type="nf4",
compress_statistics=False)` and `dequantize_4bit` of bitsandbytes 0.50.2 on a CPU."""


def ramp():
    """A weight `[2, 64]` with values between and on the codes, of both signs."""
    steps = torch.arange(128).double()
    return (torch.sin(steps * steps / 7) * torch.tensor([0.02, 3.0]).repeat_interleave(64)).bfloat16().view(2, 64)


def test_nf4_has_the_bits_of_bitsandbytes():
    codes, largest, values = OF_BITSANDBYTES
    packed = FORMATS["nf4"].pack(ramp())
    assert packed[:, :32].numpy().tobytes().hex() == codes
    assert packed[:, 32:].contiguous().view(torch.float32).flatten().tolist() == largest
    assert FORMATS["nf4"].unpack(packed, torch.bfloat16).view(torch.uint8).numpy().tobytes().hex() == values


@pytest.mark.parametrize("name", FORMATS)
def test_each_value_becomes_the_nearest_one_of_its_block(name):
    fmt = FORMATS[name]
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    weight[1, :64] = 0
    packed = fmt.pack(weight)
    assert packed.shape == (6, fmt.num_bytes(192))
    assert packed.numel() == 6 * 192 * (fmt.bits + 0.5) / 8
    levels = torch.tensor(NF4) if name == "nf4" else torch.arange(-127, 128) / 127
    blocks = weight.view(6, 3, 64).double()
    largest = blocks.abs().amax(-1, keepdim=True)
    distances = (blocks[..., None] - largest[..., None] * levels.double()).abs().amin(-1)
    found = fmt.unpack(packed, torch.float32).view(6, 3, 64)
    torch.testing.assert_close((found - blocks).abs(), distances, rtol=0, atol=1e-6)
    assert torch.equal(fmt.pack(found.flatten(1)), packed)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_dequantised_weight_and_keeps_its_bytes_only(name, dtype):
    torch.manual_seed(0)
    plain = nn.Linear(128, 8, dtype=dtype).requires_grad_(False)
    layer, fmt = QuantizedLinear(plain, FORMATS[name]), FORMATS[name]
    layer.weight.copy_(fmt.pack(plain.weight))
    plain.weight.copy_(fmt.unpack(layer.weight, dtype))
    inputs = [torch.randn(5, 128, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = layer(inputs[0])
    expected = plain(inputs[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype == torch.float32 else 2e-2)
    for out in (found, expected):
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0.1)
    assert [tensor.dtype for tensor in kept] == [torch.uint8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", **SIZES)


@pytest.fixture(scope="module")
def rounded(folder, tmp_path_factory):
    """Return for each format the model whose linear layers have dequantised weights."""
    made = {}
    for name, fmt in FORMATS.items():
        made[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = fmt.unpack(fmt.pack(module.weight.data), torch.float32)
        model.save_pretrained(made[name])
    return made


def open_model(ranks, folder, mesh, lora, spec=None, **settings):
    num_ranks, sizes = MESHES[mesh]
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, lora_cfg=lora)
    built = sizes | settings
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, spec or ModelSpec(), num_ranks, **built)


FOUR = ("1", "fsdp2", "tp2", "tp2 x fsdp2")
CASES = [(name, mesh, False) for name in FORMATS for mesh in (*FOUR, "tp2+sp", "pp2 x fsdp2", "hsdp 2x2")]


@pytest.mark.parametrize(
    ("name", "mesh", "use_dora"),
    partly_exhaustive([*CASES, ("nf4", "tp2 x fsdp2", True)], always=[("nf4", "tp2 x fsdp2", False)]),
)
def test_adapters_train_on_dequantised_weights_as_in_one_process(ranks, rounded, name, mesh, use_dora):
    """What is sent before the first step is the dequantised model bit by bit."""
    plain = PLAIN.model_copy(update={"use_dora": use_dora})
    expected = replace(CHECK, lora=plain).expect(rounded[name], has_adapters=True)
    check = replace(CHECK, lora=plain.model_copy(update={"base_quantization": name}))
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=True)
    outcome = check.check_case(ranks, rounded[name], case, expected)
    assert outcome.verdict == "exact", outcome


@pytest.mark.parametrize("name", partly_exhaustive(FORMATS, always=["nf4"]))
def test_a_run_resumes_bit_equal_and_its_exports_are_its_model(ranks, folder, rounded, tmp_path, name):
    lora, batch = PLAIN.model_copy(update={"base_quantization": name}), make_batch(seed=7)
    with open_model(ranks, folder, "fsdp2", lora) as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(str(tmp_path / "saved"))
        expected = model.train_steps([make_batch(seed=seed) for seed in (1, 2)], TokenLoss())
        logprobs = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "hf"))
        model.export_adapter(str(tmp_path / "adapter"))
    with open_model(ranks, folder, "fsdp2", lora, ModelSpec(keeps_reference=True)) as model:
        before = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.load(str(tmp_path / "saved"))
        assert model.train_steps([make_batch(seed=seed) for seed in (1, 2)], TokenLoss()) == expected
        assert np.array_equal(model.infer(batch, [LOGPROBS]).ragged("logprobs").values, logprobs)
        assert np.array_equal(model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").values, before)
    whole, adapted = Oracle(tmp_path / "hf"), Oracle(rounded[name])
    adapted.model = PeftModel.from_pretrained(adapted.model, tmp_path / "adapter").merge_and_unload()
    for oracle in (whole, adapted):
        np.testing.assert_allclose(oracle.infer(batch, [LOGPROBS])["logprobs"], logprobs, atol=1e-5)
    plain = Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]
    assert abs(plain - before).max() > 1e-3


def test_a_rank_holds_the_bytes_of_the_format(ranks, folder):
    """The other tensors are the embedding, the head and the norms in float32, and the adapters."""
    counted = {}
    for name in (None, *FORMATS):
        lora = PLAIN.model_copy(update={"base_quantization": name})
        with open_model(ranks, folder, "1", lora):
            (counted[name],) = ranks.run("dtensor_factories:parameter_bytes", [()])
    linear = sum(tensor.numel() for name, tensor in read_files(folder).items() if name.endswith("_proj.weight"))
    for name, fmt in FORMATS.items():
        assert counted[None] - counted[name] == linear * (4 - (fmt.bits + 0.5) / 8)


def test_models_whose_weights_are_not_whole_blocks_are_refused_by_name(ranks, tmp_path):
    lora = PLAIN.model_copy(update={"base_quantization": "nf4"})
    narrow = write_tiny_model(tmp_path / "narrow", "llama")
    with pytest.raises(WorkerError, match=r"base_quantization: .*q_proj has 32 inputs, and nf4 quantises blocks of 64"):
        open_model(ranks, narrow, "1", lora)
    odd = write_tiny_model(tmp_path / "odd", "llama", **SIZES | {"intermediate_size": 192})
    with pytest.raises(WorkerError, match=r"parts of the 192 inputs of .*down_proj are not whole blocks of 64"):
        open_model(ranks, odd, "tp2", lora)
    mixture = write_tiny(AutoConfig.for_model("qwen3_moe"), tmp_path / "mixture")
    with pytest.raises(WorkerError, match="qwen3_moe models have stacked experts"):
        open_model(ranks, mixture, "1", lora)
    with pytest.raises(WorkerError, match=r"cannot be combined with dtensor_cfg.compile=true"):
        open_model(ranks, odd, "1", lora, compile=True)
