"""Models whose linear layers are quantised in their files."""

import json
from pathlib import Path

import pytest
import torch
from quantized_parts import read_parts
from safetensors.torch import load_file, save_file

from rl_core.torch.quantization.files import quantise, quantise_to_stdout
from rl_core.torch.quantization.formats import rounded, weight_format

LINEAR = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
KEPT = ("mlp.gate", "mlp.experts.0.up_proj")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two files and an index, as larger models have them."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int = 32, columns: int = 64) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator)

    source = tmp_path / "source"
    source.mkdir()
    files: list[dict[str, torch.Tensor]] = []
    for layer in range(2):
        names = (*LINEAR, *KEPT)
        files.append({f"model.layers.{layer}.{name}.weight": matrix() for name in names})
        files[-1][f"model.layers.{layer}.norm.weight"] = torch.ones(64)
    files[0] |= {"model.embed_tokens.weight": matrix(101), "lm_head.weight": matrix(101)}
    files[0] |= {"visual.layers.0.q_proj.weight": matrix(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    placed = {}
    for place, tensors in enumerate(files):
        save_file(tensors, source / f"model-{place + 1:05d}-of-00002.safetensors", {"format": "pt"})
        placed |= dict.fromkeys(tensors, f"model-{place + 1:05d}-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "torch_dtype": "float32"}))
    (source / "tokenizer.json").write_text("{}")
    return source


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def test_linear_layers_are_quantised_and_the_rest_is_kept(folder, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    done = quantise(folder, target, weight_format("int4", 32), exclude=["o_proj", "model.layers.1.mlp"])
    before, after = read(folder), read(target)
    chosen = {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)} | {"model.layers.0.mlp.down_proj"}
    assert done.num_quantised == 3
    assert {name.removesuffix(".weight_packed") for name in after if name.endswith("_packed")} == chosen
    for name in chosen:
        parts = {suffix: after[f"{name}.{suffix}"] for suffix in ("weight_packed", "weight_scale", "weight_shape")}
        expected = rounded(before[f"{name}.weight"], weight_format("int4", 32))
        assert torch.equal(read_parts(parts).dequantise(), expected)
    kept = {name for name in before if name.removesuffix(".weight") not in chosen}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == done.dtype == "float32"
    assert "torch_dtype" not in config
    quantization = config["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    assert {"lm_head", "model.layers.0.mlp.gate", "visual.layers.0.q_proj"} <= set(quantization["ignore"])
    assert not chosen & set(quantization["ignore"])
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == done.num_bytes < done.num_bytes_before
    assert (target / "tokenizer.json").is_file()
    assert 0.05 < done.relative_error < 0.15


@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "float8"])
@pytest.mark.parametrize(
    ("given", "trained_in", "expected"),
    [
        (None, None, torch.float32),
        (None, "bfloat16", torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, "bfloat16", torch.float32),
    ],
)
def test_weights_are_rounded_in_the_precision_that_trained_them(folder, tmp_path, fmt, given, trained_in, expected):
    for path in folder.glob("*.safetensors"):
        save_file(load_file(path), path, {"format": "pt"} | ({"precision": trained_in} if trained_in else {}))
    target = tmp_path / "target"
    target.mkdir()
    form = weight_format(fmt, 32)
    done = quantise(folder, target, form, dtype=given)
    before, after = read(folder), read(target)
    squares = errors = 0.0
    for name in (f"model.layers.0.{each}" for each in LINEAR):
        quantised = form.quantise(before[f"{name}.weight"].to(expected))
        assert all(torch.equal(after[f"{name}.{suffix}"], each) for suffix, each in quantised.tensors().items())
    for name in (f"model.layers.{layer}.{each}.weight" for layer in (0, 1) for each in LINEAR):
        exact = before[name].double()
        squares += float(exact.square().sum())
        errors += float((form.quantise(before[name].to(expected)).dequantise(expected).double() - exact).square().sum())
    assert done.relative_error == pytest.approx((errors / squares) ** 0.5)
    assert json.loads((target / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "int4", "group_size": 48}, "groups of 48 do not fill rows of 64 inputs; choose another group size"),
        ({"exclude": ["c_attn"]}, "--exclude: 'c_attn' is not a linear layer of the model; name some of down_proj"),
        ({"exclude": ["model"]}, "no linear layer is left"),
        ({"format": "nf4"}, "'nf4' is not a format of weights"),
    ],
)
def test_what_does_not_fit_is_answered_by_name(folder, tmp_path, capsys, settings, message):
    given = {"format": "int4", "group_size": 32, "exclude": [], "dtype": "", **settings}
    quantise_to_stdout(str(folder), str(tmp_path), json.dumps(given))
    assert message in json.loads(capsys.readouterr().out)["problem"]


def test_a_model_that_is_quantised_or_broken_is_refused(folder, tmp_path):
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj.weight has values that are not finite"):
        quantise(folder, tmp_path, weight_format("mxfp4", 32))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {}}))
    with pytest.raises(ValueError, match="is quantised already"):
        quantise(folder, tmp_path, weight_format("mxfp4", 32))
