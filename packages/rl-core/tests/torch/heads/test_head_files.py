"""A teacher's head is read from its files."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.model import HeadFiles
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.torch.heads.reads import read_head

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param((EMBEDDING,), id="under the embedding's name"),
        pytest.param((LM_HEAD,), id="under its own"),
        pytest.param((EMBEDDING, LM_HEAD), id="apart, where its own counts"),
    ],
)
def test_a_tied_head_is_found_under_any_of_its_names(tmp_path, stored):
    path = write_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    shape = tensors.pop(EMBEDDING).shape
    apart = {name: torch.full(shape, float(number)) for number, name in enumerate(stored)}
    save_file({**tensors, **apart}, path, {"format": "pt"})
    head = read_head(HeadFiles(str(tmp_path), "float32"), 1, 4)
    assert head.weight.equal(apart[stored[-1]][1:4])
