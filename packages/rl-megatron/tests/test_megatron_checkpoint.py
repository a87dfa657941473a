"""A checkpoint that Megatron wrote becomes the Hugging Face files of the same weights, bit for bit."""

import json
import pickle
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import partly_exhaustive
from rl_megatron import megatron_checkpoint
from rl_megatron.megatron_checkpoint import convert

ALL = LAYOUTS | EXPERT_LAYOUTS
CASES = [
    ("qwen3", "tp2 pp2+sp"),
    ("deepseek_v3", "tp2 etp2 ep2+sp"),
    ("llama", "pp2 uneven"),
    ("qwen3_moe", "ep2"),
    ("gpt_oss", "ep2"),
]


def write_checkpoint(ranks, model, folder, layout, **arguments):
    num_ranks, settings = ALL[layout]
    config = ModelConfig(model_name=str(model), precision="float32")
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(trains=False), num_ranks, **settings):
        ranks.run("megatron_factories:save_as_megatron", [(str(iteration), arguments)] * num_ranks)
    return folder


@pytest.fixture(scope="module")
def checkpoint(ranks, tmp_path_factory):
    """A checkpoint and the model that it is of."""
    model = write_family(tmp_path_factory.mktemp("model"), "qwen3")
    arguments = {"num_attention_heads": 4, "norm_epsilon": 1e-6}
    return write_checkpoint(ranks, model, tmp_path_factory.mktemp("saved"), "tp2", **arguments), model


@pytest.mark.parametrize(("family", "layout"), partly_exhaustive(CASES, always=CASES[:2]))
def test_weights_of_a_checkpoint_are_those_of_the_model_that_was_saved(ranks, tmp_path, family, layout):
    model = write_family(tmp_path / "model", family)
    saved = write_checkpoint(ranks, model, tmp_path / "saved", layout)
    target = tmp_path / "written"
    target.mkdir()
    answer = convert(saved, target, str(model))
    original, written = load_file(model / "model.safetensors"), load_file(target / "model.safetensors")
    assert answer["num_tensors"] == len(written)
    assert written.keys() == original.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, original[name]), name
    AutoModelForCausalLM.from_pretrained(target)


MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
TRAINED = [("llama", "tp2", {}), ("llama", "pp2", {}), ("qwen3_moe", "ep2", {**MOE, "qk_layernorm": True})]


@pytest.mark.parametrize(("family", "layout", "fields"), partly_exhaustive(TRAINED, always=TRAINED[:1]))
def test_transformers_computes_what_a_run_of_megatron_itself_computed(ranks, tmp_path, family, layout, fields):
    model = write_family(tmp_path / "model", family, rms_norm_eps=1e-6)
    num_ranks, settings = ALL[layout]
    iteration = tmp_path / "saved/iter_0000002"
    iteration.mkdir(parents=True)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
    arguments = (settings, str(iteration), fields)
    logits = ranks.run("megatron_factories:train_plain_megatron", [arguments] * num_ranks)[-1]
    target = tmp_path / "written"
    target.mkdir()
    convert(tmp_path / "saved", target, str(model))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    found = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, **eager)
    with torch.no_grad():
        expected = found(torch.arange(12)[None] * 7 % 101).logits[0].numpy()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_files_are_split_by_size(checkpoint, tmp_path, monkeypatch):
    saved, model = checkpoint
    monkeypatch.setattr(megatron_checkpoint, "FILE_BYTES", 20_000)
    assert convert(saved, tmp_path, str(model))["num_files"] > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    original = load_file(model / "model.safetensors")
    assert index["weight_map"].keys() == original.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], original[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, "is of \\[4\\] layers and experts, but the model has 3"),
        ({"hidden_size": 40, "head_dim": 10}, "has shape"),
        ({"rms_norm_eps": 1e-4}, "layernorm_epsilon=1e-06, but the model"),
        ({"tie_word_embeddings": False}, "no output_layer.weight"),
    ],
)
def test_a_model_of_another_architecture_is_refused(checkpoint, tmp_path, fields, message):
    saved, _ = checkpoint
    model = write_family(tmp_path / "other", "qwen3", **fields)
    with pytest.raises(ValueError, match=message):
        convert(saved, tmp_path, str(model))


def test_another_family_is_refused_with_the_tensors_that_differ(checkpoint, tmp_path):
    saved, _ = checkpoint
    model = write_family(tmp_path / "other", "llama", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"it also has .*q_layernorm"):
        convert(saved, tmp_path, str(model))


EXPERT = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight"


@pytest.mark.parametrize(
    ("target", "key", "index"),
    [
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", ()),
        ("decoder.layers.2.input_layernorm.weight", "decoder.layers.self_attention.linear_qkv.layer_norm_weight", (2,)),
        ("decoder.layers.2.pre_mlp_layernorm.weight", "decoder.layers.2.mlp.linear_fc1.layer_norm_weight", ()),
        (EXPERT, "decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 2)),
        (EXPERT, "decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (2,)),
        (EXPERT, "decoder.layers.3.mlp.experts.experts.2.linear_fc1.weight", ()),
    ],
)
def test_parameters_are_found_however_megatron_stacks_and_fuses_them(target, key, index):
    tensors = {key: None, "decoder.layers.mlp.linear_fc1.weight": None}
    assert megatron_checkpoint._place_of(SimpleNamespace(target=target), tensors) == (key, index)


def test_a_format_that_is_not_torch_dist_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match=r"format zarr.*--ckpt-format torch_dist"):
        convert(tmp_path, tmp_path, "unused")
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(ValueError, match=r"no metadata\.json"):
        convert(tmp_path, tmp_path, "unused")


class Attack:
    def __reduce__(self):
        return (print, ("code ran",))


def test_code_of_pickles_is_not_run(checkpoint, tmp_path, capsys):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"builtins\.print, which can run code"):
        convert(tmp_path, tmp_path, "unused")
    torch.save({"args": Namespace(num_attention_heads=3, hidden=Attack())}, tmp_path / "common.pt")
    with pytest.raises(ValueError, match="num_attention_heads=3"):
        megatron_checkpoint.check_settings(tmp_path, {"num_attention_heads": 4})
    assert "code ran" not in capsys.readouterr().out


def test_settings_of_megatron_bridge_are_compared(tmp_path):
    text = "model:\n  _target_: a.b\n  activation_func: !!python/name:torch.nn.functional.silu ''\n  kv_channels: 8\n"
    (tmp_path / "run_config.yaml").write_text(text)
    megatron_checkpoint.check_settings(tmp_path, {"kv_channels": 8})
    with pytest.raises(ValueError, match=r"run_config\.yaml of the checkpoint has kv_channels=8"):
        megatron_checkpoint.check_settings(tmp_path, {"kv_channels": 16})
