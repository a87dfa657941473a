"""A model in a local folder is checked in the worker's environment, before anything starts."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_composite, write_tiny_model
from rl_core.testing.model_worker import make_batch
from rl_dtensor.preflight import check

FILE = "model.safetensors"


def renamed(folder, rename, **more):
    """Write the weights of a folder under other names, and further ones."""
    tensors = {rename(name): tensor for name, tensor in load_file(folder / FILE).items()}
    save_file({name: tensor for name, tensor in (tensors | more).items() if name}, folder / FILE)
    return folder


def logprobs(ranks, folder, role="policy"):
    config = ModelConfig(model_name=str(folder), precision="float32")
    with PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(role=role, trains=False), 1) as model:
        return model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values


SAVED = {
    "the model without its head": lambda name: name.removeprefix("model."),
    "from within DataParallel": lambda name: f"module.{name}",
    "from within torch.compile": lambda name: f"_orig_mod.{name}",
    "from within both": lambda name: f"module._orig_mod.{name}",
    "the model without its head from within a wrapper": lambda name: "module." + name.removeprefix("model."),
}


@pytest.mark.parametrize("how", SAVED)
def test_weights_that_were_saved_otherwise_are_read(ranks, tmp_path, how):
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    expected = logprobs(ranks, folder)
    renamed(folder, SAVED[how])
    assert check({"model_name": str(folder)}) == []
    assert logprobs(ranks, folder).tolist() == expected.tolist()


def test_weights_of_gpt2_as_published_are_read(ranks, tmp_path):
    folder = tmp_path / "model"
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=101, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    expected = logprobs(ranks, folder)
    renamed(folder, lambda name: name.removeprefix("transformer."))
    assert check({"model_name": str(folder)}) == []
    assert logprobs(ranks, folder).tolist() == expected.tolist()


HEAD = {
    "TRL": {"v_head.summary.weight": torch.zeros(1, 32), "v_head.summary.bias": torch.zeros(1)},
    "OpenRLHF": {"value_head.weight": torch.zeros(1, 32)},
    "a bias": {"score.bias": torch.zeros(1)},
}


@pytest.mark.parametrize("library", HEAD)
def test_a_head_of_another_library_is_refused_with_what_to_do(ranks, tmp_path, library):
    folder = renamed(write_tiny_model(tmp_path / "model", "qwen3"), str, **HEAD[library])
    (problem,) = check({"model_name": str(folder)})
    assert "belongs to a head of values or scores" in problem
    assert "num_labels=1" in problem
    with pytest.raises(WorkerError, match="belongs to a head of values or scores"):
        logprobs(ranks, folder, "reward_model")


def test_a_model_that_is_not_its_files_is_refused_before_anything_starts(tmp_path):
    folder = renamed(write_tiny_model(tmp_path / "model", "llama"), lambda name: "" if "layers.1.mlp" in name else name)
    (problem,) = check({"model_name": str(folder)})
    assert "missing model.layers.1.mlp" in problem
    assert check({"model_name": str(folder), "hf_config_overrides": {"hidden_sise": 3}})[0].startswith("model_name: ")


@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("idefics2", "mistral")])
def test_a_composite_model_passes_if_its_text_can_be_trained(tmp_path, kind, text):
    language = write_tiny_model(tmp_path / "language", text, tie_word_embeddings=kind == "gemma3")
    assert check({"model_name": str(write_composite(tmp_path / "whole", kind, language))}) == []


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "glm4v", "florence2", "t5", "qwen2_5_omni"])
def test_a_model_without_a_language_model_is_refused_by_name(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    save_file({}, tmp_path / FILE)
    (problem,) = check({"model_name": str(tmp_path)})
    assert re.search(rf"{kind}\w* models", problem), problem


def test_a_family_whose_code_fails_is_refused_with_its_error(tmp_path):
    fields = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 0, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({}, tmp_path / FILE)
    assert check({"model_name": str(tmp_path)})
