from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rl_core.errors import WeightSyncError
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.torch.files.file_names import FileNames
from rl_core.weights import Manifest, TensorSpec
from rl_dtensor.generation.generator import WeightAdoption


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def _manifest(*names: str, tied: bool) -> Manifest:
    shapes = {"embed.weight": (6, 4), "middle.weight": (4, 4), "middle.bias": (4,), "head.weight": (6, 4)}
    specs = tuple(TensorSpec(name, shapes[name], "float32") for name in names)
    return Manifest(3, specs, {"head.weight": "embed.weight"} if tied else {})


TRUNK = ("embed.weight", "middle.weight", "middle.bias")


def _take_all(adoption: WeightAdoption, manifest: Manifest) -> dict[str, torch.Tensor]:
    sent = {spec.name: torch.randn(spec.shape) for spec in manifest.tensors}
    for name, tensor in sent.items():
        adoption.take(name, tensor)
    return sent


@pytest.mark.parametrize("named", [True, False])
def test_a_tied_head_follows_the_embedding(named: bool) -> None:
    model = Model(tied=True)
    manifest = _manifest(*TRUNK, tied=named)
    adoption = WeightAdoption(model, manifest)
    sent = _take_all(adoption, manifest)
    adoption.verify()
    assert torch.equal(model.head.weight, sent["embed.weight"])


def test_a_head_the_engine_keeps_apart_follows_a_manifest_that_ties_it() -> None:
    model = Model(tied=False)
    manifest = _manifest(*TRUNK, tied=True)
    adoption = WeightAdoption(model, manifest)
    sent = _take_all(adoption, manifest)
    adoption.verify()
    assert torch.equal(model.head.weight, sent["embed.weight"])
    assert torch.equal(model.embed.weight, sent["embed.weight"])


def test_a_head_of_its_own_that_is_left_out_is_named() -> None:
    with pytest.raises(WeightSyncError) as caught:
        WeightAdoption(Model(tied=False), _manifest(*TRUNK, tied=False))
    assert caught.value.tensors == ("head.weight",)


def test_a_head_sent_apart_to_an_engine_that_ties_it_is_named() -> None:
    with pytest.raises(WeightSyncError) as caught:
        WeightAdoption(Model(tied=True), _manifest(*TRUNK, "head.weight", tied=False))
    assert caught.value.tensors == ("embed.weight", "head.weight")


def test_another_shape_is_named() -> None:
    manifest = _manifest(*TRUNK, tied=True)
    wrong = (*manifest.tensors[:1], replace(manifest.tensors[1], shape=(4, 5)), *manifest.tensors[2:])
    with pytest.raises(WeightSyncError) as caught:
        WeightAdoption(Model(tied=True), replace(manifest, tensors=wrong))
    assert caught.value.tensors == ("middle.weight",)


def test_what_changed_after_arrival_or_never_arrived_is_named() -> None:
    model = Model(tied=True)
    manifest = _manifest(*TRUNK, tied=True)
    adoption = WeightAdoption(model, manifest)
    _take_all(adoption, manifest)
    model.head.weight = nn.Parameter(torch.randn(6, 4))
    with torch.no_grad():
        model.middle.bias.add_(1)
    with pytest.raises(WeightSyncError) as caught:
        adoption.verify()
    assert caught.value.tensors == ("head.weight", "middle.bias")
    adoption = WeightAdoption(model, manifest)
    with pytest.raises(WeightSyncError) as caught:
        adoption.verify()
    assert set(caught.value.tensors) == {*TRUNK, "head.weight"}


def test_weights_convert_to_the_models_precision() -> None:
    model = Model(tied=True).to(torch.bfloat16)
    manifest = _manifest(*TRUNK, tied=True)
    adoption = WeightAdoption(model, manifest)
    sent = _take_all(adoption, manifest)
    adoption.verify()
    assert torch.equal(model.middle.weight, sent["middle.weight"].bfloat16())


def test_experts_that_the_model_stacks_are_taken_in_one_by_one(tmp_path: Path) -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    folder = write_tiny_model(tmp_path / "sent", "qwen3_moe", seed=1, **fields)
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "own", "qwen3_moe", seed=2, **fields))
    sent = load_file(folder / "model.safetensors")
    specs = tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in sent.items())
    adoption = WeightAdoption(model, Manifest(1, specs, {}), FileNames(model))
    for name, tensor in sent.items():
        adoption.take(name, tensor)
    adoption.verify()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 30] += 1
    with pytest.raises(WeightSyncError) as caught:
        adoption.verify()
    assert caught.value.tensors == ("model.layers.1.mlp.experts.3.up_proj.weight",)
    missing = Manifest(2, tuple(spec for spec in specs if ".0.mlp.experts.2.down_proj" not in spec.name), {})
    with pytest.raises(WeightSyncError) as caught:
        WeightAdoption(model, missing, FileNames(model))
    assert caught.value.tensors == ("model.layers.0.mlp.experts.2.down_proj.weight",)
