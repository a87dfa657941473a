"""Damage of safetensors is found in their headers and sizes."""

import json

import pytest
from safetensors_files import write_weights

from rl_launch.model_files.weight_files import shapes_of, weight_file_problems

SHARDS = {"model-1.safetensors": {"a": (2, 3), "b": (4,)}, "model-2.safetensors": {"c": (5,)}}


def header_of(text):
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.fixture
def sharded(tmp_path):
    for file, shapes in SHARDS.items():
        write_weights(tmp_path / file, shapes)
    weight_map = {name: file for file, shapes in SHARDS.items() for name in shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_header_has_the_shapes_and_the_size(tmp_path):
    write_weights(tmp_path / "x", {"a": (2, 3), "b": (4,)})
    assert shapes_of(tmp_path / "x", whole=True) == {"a": (2, 3), "b": (4,)}


def test_whole_files_have_no_problem(sharded, tmp_path):
    assert list(weight_file_problems(sharded)) == []
    assert list(weight_file_problems(sharded.parent / "elsewhere")) == []
    single = tmp_path / "single"
    single.mkdir()
    write_weights(single / "model.safetensors", {"a": (2,)})
    assert list(weight_file_problems(single)) == []


def test_a_truncated_shard_is_named_with_its_sizes(sharded):
    path = sharded / "model-1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (problem,) = weight_file_problems(sharded)
    assert problem == f"model-1.safetensors is truncated: it has {len(whole) - 1} of {len(whole)} bytes"
    path.write_bytes(whole + b"x")
    assert list(weight_file_problems(sharded)) == [
        f"model-1.safetensors does not match its header: it has {len(whole) + 1} of {len(whole)} bytes"
    ]
    path.write_bytes(whole[:20])
    assert list(weight_file_problems(sharded)) == ["model-1.safetensors is truncated: it ends within its header"]


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-2.safetensors").unlink()
    (problem,) = weight_file_problems(sharded)
    assert "lists model-2.safetensors, which is missing (1 of 2 files)" in problem


def test_tensors_that_a_shard_does_not_hold_are_named(sharded):
    write_weights(sharded / "model-1.safetensors", {"a": (2, 3)})
    (problem,) = weight_file_problems(sharded)
    assert problem.endswith("places b in model-1.safetensors, which does not contain it")


@pytest.mark.parametrize("file", ["../model-2.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_a_file_outside_of_the_folder_is_not_read(sharded, file):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    (problem,) = weight_file_problems(sharded)
    assert problem.endswith(f"lists {file}, which is not in the folder. Download the model again")


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_an_index_that_is_not_one_is_named(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    (problem,) = weight_file_problems(sharded)
    assert problem.startswith("model.safetensors.index.json is not a valid index of weights")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not valid"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "its header is not valid"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        (header_of("[" * 100_000), "its header is not valid"),
        (header_of('{"a": {"shape": [1], "data_offsets": [0, ' + "9" * 5000 + "]}}"), "its header is not valid"),
        (header_of('{"a": {"shape": [1], "data_offsets": [-8, 0]}}'), "its header is not valid"),
        (header_of('{"a": {"shape": [1], "data_offsets": [8, 4]}}'), "its header is not valid"),
        (
            header_of('{"a": {"shape": [2], "data_offsets": [0, 8]}, "b": {"shape": [2], "data_offsets": [4, 12]}}'),
            "its header is not valid",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "run `git lfs pull`"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)
    (problem,) = weight_file_problems(tmp_path)
    assert problem.startswith("model.safetensors ")
    assert says in problem
