"""A model's folder, seen without the libraries that load it."""

import json

import pytest

from rl_launch.model_files.model_folder import (
    MODEL_FILES,
    adapter_problems,
    folder_problems,
    hf_config_fields,
    layer_names,
)


def write(path, tensors):
    header = {"__metadata__": {"format": "pt"}}
    for name, shape in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "model-00001.safetensors", {"model.layers.0.self_attn.q_proj.weight": [8, 8]})
    write(tmp_path / "model-00002.safetensors", {"model.norm.weight": [8], "lm_head.weight": [32, 8]})
    return tmp_path


def test_layers_are_read_from_the_headers_of_all_files(folder):
    assert layer_names(str(folder)) == ["lm_head", "model.layers.0.self_attn.q_proj"]


def test_the_family_of_a_composite_model_is_that_of_its_text(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert hf_config_fields(str(tmp_path)) == text


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_nothing_is_said_of_files_that_cannot_be_read(folder, content):
    (folder / "model-00003.safetensors").write_bytes(content)
    assert layer_names(str(folder)) == []
    assert list(adapter_problems("key", str(folder), ["nonesuch"])) == []


def test_targets_that_name_no_layer_are_refused_with_the_nearest(folder):
    assert list(adapter_problems("key", str(folder), ["q_proj", "self_attn.q_proj", "attention.q_proj"])) == []
    assert list(adapter_problems("key", "some/model", ["nonesuch"])) == []
    (problem,) = adapter_problems("key", str(folder), ["q_prj"])
    assert (problem.key, problem.got, problem.allowed) == ("key", "q_prj", "lm_head, q_proj")
    assert "q_proj?" in problem.remedy
    (problem,) = adapter_problems("key", str(folder), ["q_proj", "self_attn.v_proj"])
    assert problem.got == "self_attn.v_proj"
    assert str(folder) in problem.reason


def test_a_run_directory_in_the_place_of_a_model_names_those_that_it_holds(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (problem,) = folder_problems("value.model_name", str(tmp_path), MODEL_FILES)
    assert (problem.key, problem.got) == ("value.model_name", str(tmp_path))
    assert "no checkpoint" in problem.remedy
    for name in ("step_9/hf", "step_10/hf", "step_10/hf_critic"):
        model = tmp_path / "checkpoints" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (problem,) = folder_problems("value.model_name", str(tmp_path), MODEL_FILES)
    newest = tmp_path / "checkpoints" / "step_10"
    assert problem.remedy.endswith(f" {newest}/hf, {newest}/hf_critic")
