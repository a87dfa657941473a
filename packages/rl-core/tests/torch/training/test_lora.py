"""Which layers get adapters, and what adapters start from."""

import json

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.torch.training.lora import (
    InitialFactors,
    check_base,
    check_sizes,
    flat_factors,
    initial_down,
    is_adapted,
    is_adapted_stack,
    peft_layers,
    size_of,
    stacked_factors,
)


def test_layers_are_chosen_by_whole_parts_of_their_names():
    named = LoraConfig(match_all_linear=False, target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["1.q_proj"])
    assert is_adapted("layers.0.q_proj", named)
    assert is_adapted("q_proj", named)
    assert is_adapted("layers.0.mlp.up_proj", named)
    for other in ("layers.0.seq_proj", "layers.0.up_proj", "layers.1.q_proj", "layers.0.q_proj.base"):
        assert not is_adapted(other, named)
    everywhere = LoraConfig(exclude_modules=["q_proj"])
    assert is_adapted("layers.0.k_proj", everywhere)
    assert not is_adapted("layers.0.q_proj", everywhere)


def test_the_first_pattern_that_matches_sets_a_size_as_in_peft():
    ranks = {"1.q_proj": 2, "q_proj": 16, r"layers\.\d\.(up|gate)_proj": 4, "^layers.0.down_proj": 3}
    alphas = {"o_proj": 5, "layers.1.q_proj": 9}
    config = LoraConfig(dim=8, alpha=16, rank_pattern=ranks, alpha_pattern=alphas)
    names = ("q_proj", "up_proj", "gate_proj", "down_proj", "o_proj", "seq_proj")
    prefixes = [f"{start}layers.{number}." for start in ("", "model.") for number in (0, 1, 11)]
    for layer in (prefix + name for prefix in prefixes for name in names):
        dim = ranks.get(get_pattern_key(ranks, layer), 8)
        alpha = alphas.get(get_pattern_key(alphas, layer), 16)
        assert size_of(layer, config) == (dim, alpha, alpha / dim), layer
    assert (
        size_of("model.layers.0.q_proj", LoraConfig(rank_pattern={"model.language_model.layers.0.q_proj": 3})).dim == 3
    )
    check_sizes(config, ["model.layers.1.q_proj", "layers.0.up_proj", "layers.0.down_proj", "o_proj"])
    with pytest.raises(ValueError, match=r"alpha_pattern: 'o_proj' matches no layer .* Names end in q_proj"):
        check_sizes(LoraConfig(alpha_pattern={"o_proj": 5}), ["layers.1.q_proj"])


def test_principal_factors_are_those_of_peft_and_their_product_has_the_largest_singular_values():
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    stored = {"q_proj.weight": weight}
    config = LoraConfig(enabled=True, dim=4, alpha=6, init="pissa")
    initial = InitialFactors.of(config, seed=1, stored=stored.__getitem__)
    down, up = initial.of_weight("q_proj.weight", (4, 20), (12, 4))
    layer = torch.nn.Linear(20, 12, bias=False)
    layer.weight.data.copy_(weight)
    theirs = inject_adapter_in_model(
        PeftConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights="pissa"),
        torch.nn.ModuleDict({"q_proj": layer}),
    )["q_proj"]
    torch.testing.assert_close(down, theirs.lora_A["default"].weight.data)
    torch.testing.assert_close(up, theirs.lora_B["default"].weight.data)
    torch.testing.assert_close(weight - 1.5 * up @ down, theirs.base_layer.weight.data)
    values = torch.linalg.svdvals(1.5 * up @ down)
    torch.testing.assert_close(values[:4], torch.linalg.svdvals(weight)[:4])
    assert initial.of_weight("q_proj.weight", (4, 20), (12, 4))[0] is down, "it is computed once"


def test_an_adapter_starts_the_same_in_every_process_and_unlike_its_neighbours():
    first = initial_down("layers.0.q_proj.weight", (8, 16), seed=1)
    assert first.dtype == torch.float32
    assert first.abs().max() <= 0.25
    assert torch.equal(first, initial_down("layers.0.q_proj.weight", (8, 16), seed=1))
    assert not torch.equal(first, initial_down("layers.1.q_proj.weight", (8, 16), seed=1))
    assert not torch.equal(first, initial_down("layers.0.q_proj.weight", (8, 16), seed=2))


@pytest.fixture
def folder(tmp_path):
    """An adapter of one layer, `[2, 3]` and `[4, 2]`, in half precision."""
    factors = {"lora_A": torch.ones(2, 3).bfloat16(), "lora_B": torch.full((4, 2), 2.0).bfloat16()}
    named = {f"base_model.model.layers.0.q_proj.{name}.weight": factor for name, factor in factors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_adapters_start_from_those_of_a_folder_or_anew(folder):
    given = InitialFactors.of(LoraConfig(enabled=True, adapter=str(folder)), seed=1)
    given.check(["layers.0.q_proj.weight"])
    down, up = given.of_weight("layers.0.q_proj.weight", (2, 3), (4, 2))
    assert (down.dtype, up.dtype) == (torch.float32, torch.float32)
    assert (down.tolist(), up.tolist()) == ([[1.0] * 3] * 2, [[2.0] * 2] * 4)
    down, up = InitialFactors.of(LoraConfig(enabled=True), seed=1).of_weight("a.weight", (2, 3), (4, 2))
    assert torch.equal(down, initial_down("a.weight", (2, 3), 1))
    assert not up.any()


def test_an_adapter_of_another_model_is_refused_by_name(folder):
    given = InitialFactors.of(LoraConfig(enabled=True, adapter=str(folder)), seed=1)
    with pytest.raises(ValueError, match=r"has 2 tensors of layers without an adapter here, such as layers.0.q_proj.l"):
        given.check(["layers.0.k_proj.weight"])
    for weight, down in (("layers.0.q_proj.weight", (8, 3)), ("layers.0.k_proj.weight", (2, 3))):
        with pytest.raises(ValueError, match="set dim, rank_pattern and target_modules as they are in that adapter"):
            given.of_weight(weight, down, (4, 2))
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        InitialFactors.of(LoraConfig(enabled=True, adapter=str(folder / "none")), seed=1)


def test_stacked_experts_are_chosen_by_their_own_key():
    config = LoraConfig(target_parameters=["experts.down_proj"], exclude_modules=["1.mlp.experts.down_proj"])
    assert is_adapted_stack("layers.0.mlp.experts.down_proj", config)
    assert not is_adapted_stack("layers.1.mlp.experts.down_proj", config)
    assert not is_adapted_stack("layers.0.mlp.experts.gate_up_proj", config)
    assert not is_adapted_stack("layers.0.mlp.experts.down_proj", LoraConfig())


def test_factors_of_stacked_experts_are_named_and_laid_out_as_in_peft():
    assert peft_layers(["0.q_proj.weight", "0.experts.gate_up_proj", "0.experts.down_proj", "1.experts.down_proj"]) == {
        "0.q_proj.weight": "0.q_proj",
        "0.experts.gate_up_proj": "0.experts.base_layer",
        "0.experts.down_proj": "0.experts",
        "1.experts.down_proj": "1.experts",
    }
    down, up = torch.randn(3, 2, 5), torch.randn(3, 4, 2)
    flat_down, flat_up = flat_factors(down, up)
    in_peft = torch.einsum("ore,eri->eoi", flat_up.reshape(4, 2, 3), flat_down.reshape(3, 2, 5))  # its get_delta_weight
    torch.testing.assert_close(in_peft, up @ down)
    for found, expected in zip(stacked_factors(flat_down, flat_up, 3), (down, up), strict=True):
        assert torch.equal(found, expected)


def check(adapter, base, folder):
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    config = ModelConfig(model_name=str(folder), lora_cfg=LoraConfig(enabled=True, adapter=str(adapter)))
    check_base(config, folder)


def test_an_adapter_of_other_weights_of_the_same_shapes_is_refused(tmp_path, folder):
    base = write_tiny_model(tmp_path / "base", "llama")
    other = write_tiny_model(tmp_path / "other", "llama", seed=1)
    rounded = write_tiny_model(tmp_path / "rounded", "llama", dtype="bfloat16", max_shard_size="20KB")
    larger = write_tiny_model(tmp_path / "larger", "llama", intermediate_size=64)
    for same in (base, rounded):
        check(folder, base, same)
    for wrong in (other, larger):
        with pytest.raises(ValueError, match=r"was trained on .*base, whose weights differ from .*_proj.weight"):
            check(folder, base, wrong)


def test_an_adapter_of_a_model_that_is_elsewhere_is_told_of(tmp_path, folder, caplog):
    base = write_tiny_model(tmp_path / "base", "llama")
    check(folder, "org/base", base)
    assert "was trained on org/base, which is not compared with" in caplog.text
    caplog.clear()
    check(folder, "", base)
    check(folder, base, base)
    assert not caplog.text
