"""Pickled weights become safetensors with the same values, and what they could run is not run."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.files.pickled import convert, convert_to_stdout


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "tie_word_embeddings": true}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_mine.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def weights():
    random = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4, generator=random),
        "model.norm.weight": torch.tensor([1.0, float("nan"), float("inf"), -0.0]).to(torch.bfloat16),
        "model.rank": torch.tensor(3, dtype=torch.int64),
        "model.mask": torch.tensor([True, False]),
        "model.empty": torch.zeros(0, 4),
    }


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        pairs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(*pairs), name


@pytest.mark.parametrize("in_zip", [True, False])
def test_the_values_are_the_same_bit_by_bit_in_both_formats_of_pytorch(source, target, in_zip):
    torch.save(weights(), source / "pytorch_model.bin", _use_new_zipfile_serialization=in_zip)
    made = convert(source, target)
    same_bits(load_file(target / "model.safetensors"), weights())
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (made.num_files, made.num_tensors, made.shared) == (1, 5, ())
    assert made.num_bytes == 7 * 4 * 4 + 4 * 2 + 8 + 2
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_files_of_an_index_stay_apart(source, target):
    first, second = ({name: value} for name, value in list(weights().items())[:2])
    torch.save(first, source / "pytorch_model-00001-of-00002.bin")
    torch.save(second, source / "pytorch_model-00002-of-00002.bin")
    placed = {
        next(iter(first)): "pytorch_model-00001-of-00002.bin",
        next(iter(second)): "pytorch_model-00002-of-00002.bin",
    }
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    made = convert(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.num_bytes == 7 * 4 * 4 + 4 * 2
    assert index["weight_map"]["model.norm.weight"] == "model-00002-of-00002.safetensors"
    files = WeightFiles.of(target)
    with files.open() as opened:
        same_bits({name: opened.read(name, ()) for name in files.names}, {**first, **second})


def test_tensors_that_share_memory_are_written_in_full(source, target):
    embedding = torch.randn(6, 4)
    shared = {
        "model.embed_tokens.weight": torch.nn.Parameter(embedding),
        "lm_head.weight": embedding,
        "model.rows": embedding[2:4],
        "model.transposed": torch.randn(3, 5).T,
        "model.slice": torch.randn(8)[:2],
    }
    torch.save(shared, source / "pytorch_model.bin")
    made = convert(source, target)
    same_bits(load_file(target / "model.safetensors"), {name: value.detach() for name, value in shared.items()})
    assert made.shared == ("lm_head.weight", "model.embed_tokens.weight", "model.rows")
    # no more than the values themselves
    assert (target / "model.safetensors").stat().st_size < 4 * (24 + 24 + 8 + 15 + 2) + 1000


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_code_of_a_pickle_is_not_run(source, target, tmp_path):
    torch.save({"weight": torch.ones(1), "other": Payload(tmp_path / "trace")}, source / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin holds more than tensors \(posix\.mkdir\).*save_pretrained"
    ):
        convert(source, target)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([torch.ones(1)], "holds list, not tensors by name"),
        ({"model": {"weight": torch.ones(1)}, "step": 3}, "other values than tensors under model, step"),
        ({}, "holds no tensors"),
        ({"weight": torch.ones(2, 2).to_sparse()}, "sparse or quantised tensors.*: weight"),
    ],
)
def test_what_is_not_tensors_by_name_is_refused(source, target, held, message):
    torch.save(held, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        convert(source, target)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}, "pytorch_model-2.bin, which the folder does not"),
        (
            {"a": "pytorch_model-1.bin", "b": "pytorch_model-1.bin"},
            "places b in pytorch_model-1.bin, which does not hold",
        ),
        ({"a": "../pytorch_model-1.bin"}, "which is not a file of the folder"),
        ({"a": "pytorch_model-1.bin", "c": "pytorch_model-3.bin"}, "pytorch_model-3.bin holds a, which another file"),
        (["a"], "not a valid index"),
    ],
)
def test_files_that_are_not_those_of_the_index_are_refused(source, target, placed, message):
    torch.save({"a": torch.ones(1)}, source / "pytorch_model-1.bin")
    torch.save({"a": torch.ones(1), "c": torch.ones(1)}, source / "pytorch_model-3.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ValueError, match=message):
        convert(source, target)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_named(source, target, content, capsys):
    (source / "pytorch_model.bin").write_bytes(content)
    convert_to_stdout(str(source), str(target))
    assert "pytorch_model.bin is damaged, or " in json.loads(capsys.readouterr().out)["problem"]


def test_a_pointer_of_git_lfs_is_named(source, target):
    (source / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        convert(source, target)


def test_the_driver_gets_one_json_object(source, target, capsys):
    torch.save(weights(), source / "pytorch_model.bin")
    convert_to_stdout(str(source), str(target))
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 5
    convert_to_stdout(str(Path(target)), str(target))
    assert "has neither pytorch_model.bin nor" in json.loads(capsys.readouterr().out)["problem"]
