"""Quantisation-aware training: a model computes, trains and sends the weights that an engine serves."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import free_port
from rl_core.selfcheck.torch.received import receive
from rl_core.selfcheck.torch.selfcheck import write_random
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.torch.quantization.files import quantise
from rl_core.torch.quantization.float8 import Float8Weight
from rl_core.torch.quantization.formats import Int4Weight, MXFP4Weight, rounded, weight_format
from rl_core.weights import Transport
from rl_dtensor import preflight

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "group_size": 32},
    "mxfp4": {"format": "mxfp4"},
    "float8": {"format": "float8"},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp2+sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
}
NLL = TokenLoss(entropy_weight=0, topk_weight=0, candidates_weight=0, sequence_weight=0)
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05})
NUM_ROWS, NUM_STEPS = 12, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 101, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, **heads, initializer_range=0.2)
    return write_random(config, tmp_path_factory.mktemp("model"))


def rounded_files(folder: Path, settings: dict[str, Any], dtype: torch.dtype, target: Path) -> Path:
    """The same model with the weights of its linear layers as they are after they were quantised."""
    fmt = weight_format(settings["format"], settings.get("group_size", 128))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {name: rounded(each, fmt) if is_linear(name) else each for name, each in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


def dequantised(folder: Path, target: Path) -> Path:
    """The model of quantised files, with the weights that they stand for in the dtype of its config."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    dtype = getattr(torch, config["dtype"])
    stems = {name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")}
    plain = {name: each for name, each in tensors.items() if not any(name.startswith(stem) for stem in stems)}
    for stem in stems:
        parts = {name.rpartition(".")[2]: each for name, each in tensors.items() if name.startswith(stem)}
        plain[stem] = read_parts(parts).dequantise(dtype)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    return target


def read_parts(parts: dict[str, Tensor]) -> Any:
    if "weight_packed" not in parts:
        return Float8Weight(parts["weight"], parts["weight_scale"], "per_channel")
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    if "weight_shape" not in parts:
        return MXFP4Weight(torch.stack((packed & 0xF, packed >> 4), 2).flatten(1), scales)
    shifts = torch.arange(8, dtype=torch.int32) * 4
    return Int4Weight((((packed[..., None] >> shifts) & 0xF).flatten(1) - 8).to(torch.int8), scales)


def is_linear(name: str) -> bool:
    return name.removesuffix(".weight").endswith(LINEAR)


def build(ranks: Any, folder: Path, mesh: str = "fsdp2", precision: str = "bfloat16", **settings: Any) -> PooledModel:
    num_ranks, sizes = MESHES[mesh]
    packing = SequencePackingConfig(train_mb_tokens=32, logprob_mb_tokens=32)
    optimizer = settings.pop("optimizer", SGD)
    config = ModelConfig(model_name=str(folder), precision=precision, sequence_packing=packing, optimizer=optimizer)
    return PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(), num_ranks, **sizes, **settings)


def qat(name: str, **settings: Any) -> dict[str, Any]:
    return {"qat": {"enabled": True, **FORMATS[name], **settings}}


def sent(model: PooledModel) -> dict[str, Tensor]:
    """The tensors that a generator gets."""
    manifest = model.manifest(1)
    transport = Transport("collective", f"127.0.0.1:{free_port()}", 1, bucket_bytes=65536, timeout_s=60)
    received: list[Any] = []
    receiver = threading.Thread(target=lambda: received.append(receive(manifest, transport)))
    receiver.start()
    model.send(manifest, transport)
    receiver.join(60)
    return dict(received[0][0])


def exported(model: PooledModel, target: Path) -> dict[str, Tensor]:
    model.export(str(target))
    return load_file(target / "model.safetensors")


def logprobs(model: PooledModel) -> np.ndarray:
    return model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values


@pytest.mark.parametrize(
    ("settings", "mention"),
    [
        ({}, ""),
        ({"group_size": 48}, "groups of 48 do not fill the 64 inputs of model.layers.0.self_attn.q_proj"),
        ({"group_size": 128}, "groups of 128 do not fill the 64 inputs"),
        ({"group_size": 64, "tensor_parallel_size": 2}, "32 inputs of each of 2 tensor-parallel ranks of"),
        ({"group_size": 64, "tensor_parallel_size": 2, "exclude_modules": ["o_proj"]}, ""),
        ({"exclude_modules": ["c_attn"]}, "'c_attn' is not a linear layer"),
    ],
)
def test_groups_that_do_not_fill_rows_are_refused_before_a_rank_is_built(folder, settings, mention):
    mesh = {name: settings[name] for name in ("tensor_parallel_size",) if name in settings}
    chosen = {name: value for name, value in settings.items() if name not in mesh}
    section = {"model_name": str(folder), "dtensor_cfg": {**mesh, **qat("int4", **chosen)}}
    found = preflight.check(section)
    assert bool(found) == bool(mention)
    assert all(mention in each for each in found)


@pytest.mark.parametrize(
    ("name", "mesh"),
    partly_exhaustive([("int4", "fsdp2"), ("mxfp4", "pp2"), ("float8", "cp2")], always=[("mxfp4", "pp2")]),
)
def test_a_model_computes_bit_for_bit_with_the_weights_that_are_served(ranks, folder, tmp_path, name, mesh):
    served = rounded_files(folder, FORMATS[name], torch.bfloat16, tmp_path / "served")
    with build(ranks, served, mesh) as model:
        expected, plain = logprobs(model), sent(model)
    with build(ranks, folder, mesh, **qat(name)) as model:
        assert np.array_equal(logprobs(model), expected)
        found = sent(model)
        assert all(torch.equal(found[each], plain[each]) for each in plain)
        masters = exported(model, tmp_path / "exported")
    source = load_file(folder / "model.safetensors")
    assert all(torch.equal(masters[each], source[each].to(masters[each].dtype)) for each in masters)


@pytest.mark.parametrize(
    ("name", "precision"),
    partly_exhaustive(
        [(name, precision) for name in FORMATS for precision in ("float32", "bfloat16")], always=[("int4", "float32")]
    ),
)
def test_quantised_files_stand_for_the_weights_of_a_run(ranks, folder, tmp_path, name, precision):
    with build(ranks, folder, "fsdp2", precision, **qat(name)) as model:
        model.train_step(make_batch(), TokenLoss())
        expected = logprobs(model)
        model.export(str(tmp_path / "exported"))
    fmt = weight_format(FORMATS[name]["format"], FORMATS[name].get("group_size", 128))
    (tmp_path / "quantised").mkdir()
    quantise(tmp_path / "exported", tmp_path / "quantised", fmt)
    with build(ranks, dequantised(tmp_path / "quantised", tmp_path / "plain"), "fsdp2", precision) as model:
        assert np.array_equal(logprobs(model), expected)


@pytest.mark.parametrize("name", partly_exhaustive(["int4", "float8"], always=["int4"]))
def test_split_rows_are_rounded_as_whole_ones(ranks, folder, tmp_path, name):
    served = rounded_files(folder, FORMATS[name], torch.float32, tmp_path / "served")
    with build(ranks, served, "tp2+sp", precision="float32") as model:
        expected = logprobs(model)
    with build(ranks, folder, "tp2+sp", precision="float32", **qat(name)) as model:
        assert np.array_equal(logprobs(model), expected)


@pytest.mark.parametrize(
    ("name", "mesh"), partly_exhaustive([("int4", "tp2+sp"), ("mxfp4", "fsdp2")], always=[("mxfp4", "fsdp2")])
)
def test_gradients_are_those_by_the_rounded_weights(ranks, folder, tmp_path, name, mesh):
    served = rounded_files(folder, FORMATS[name], torch.float32, tmp_path / "served")
    steps = {}
    for source, settings in ((served, {}), (folder, {**qat(name), "recompute": "full"})):
        with build(ranks, source, mesh, precision="float32", **settings) as model:
            model.train_step(make_batch(), TokenLoss())
            trained = exported(model, tmp_path / f"trained_{source.name}")
        before = load_file(source / "model.safetensors")
        steps[source] = {each: trained[each] - before[each] for each in before}
    for each, expected in steps[served].items():
        assert expected.abs().max() > 1e-5, each
        torch.testing.assert_close(steps[folder][each], expected, rtol=1e-4, atol=1e-6, msg=each)


def test_layers_that_are_left_out_and_exact_weights_for_engines_that_round(ranks, folder):
    source = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    chosen = {"exclude_modules": ["o_proj", "mlp.down_proj"], "num_first_layers_in_bf16": 1}
    with build(ranks, folder, **qat("int4", **chosen)) as model:
        found = sent(model)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, source[name])}
    left = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert changed == {name for name in source if "layers.1." in name and name.removesuffix(".weight").endswith(left)}
    with build(ranks, folder, **qat("int4", sync="exact")) as model:
        found = sent(model)
    assert all(torch.equal(tensor, source[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("settings", "mesh", "message"),
    [
        (qat("int4", group_size=96), "fsdp2", r"groups of 96 do not fill the 64 inputs of model.layers.0.*q_proj"),
        (qat("int4", group_size=64), "tp2+sp", r"the 32 inputs of each of 2 tensor-parallel ranks of .*o_proj"),
        (qat("int4", exclude_modules=["c_attn"]), "fsdp2", r"exclude_modules: 'c_attn' is not a linear layer"),
        (qat("int4", num_last_layers_in_bf16=2), "fsdp2", r"qat leaves no linear layer of the 2 layers"),
    ],
)
def test_a_format_that_does_not_fit_is_refused_by_name(ranks, folder, settings, mesh, message):
    with pytest.raises(WorkerError, match=message):
        build(ranks, folder, mesh, **settings)


# the tests above hold what it rests on: products and gradients are those of the weights that are served
@exhaustive
def test_training_with_rounded_weights_loses_less_than_half_of_what_rounding_loses(ranks, folder, tmp_path):
    """Both train as long; one of them with the rounding."""
    adamw = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 4e-3, "weight_decay": 0.0})
    lengths = (12,) * NUM_ROWS
    tokens = make_batch(lengths, seed=7)
    ones = np.ones(sum(lengths))
    batch = tokens.with_columns(
        {
            "loss_mask": tokens.ragged("tokens").like(ones.astype(np.int8)),
            "weights": tokens.ragged("tokens").like(ones.astype(np.float32)),
        }
    )

    def trained(source: Path, target: Path, **settings: Any) -> float:
        with build(ranks, source, precision="float32", optimizer=adamw, **settings) as model:
            model.train_steps([batch] * NUM_STEPS, NLL)
            model.export(str(target))
            return model.evaluate(batch, NLL)["nll"]

    def loss_of(source: Path) -> float:
        served = rounded_files(source, FORMATS["int4"], torch.float32, source.with_name(f"{source.name}_served"))
        with build(ranks, served, precision="float32") as model:
            return model.evaluate(batch, NLL)["nll"]

    trained(folder, tmp_path / "start")
    exact = trained(tmp_path / "start", tmp_path / "plain")
    in_training = trained(tmp_path / "start", tmp_path / "aware", **qat("int4"))
    plain, aware = loss_of(tmp_path / "plain"), loss_of(tmp_path / "aware")
    assert in_training == pytest.approx(aware, rel=1e-5), "what is served is what was trained"
    assert plain - exact > 1e-3
    assert aware - exact < 0.5 * (plain - exact)
