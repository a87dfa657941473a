"""The self-check shrinks a family's config and tells right from wrong."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import ConfigError
from rl_core.plugins import resolve
from rl_core.selfcheck.cases import FamilyCase
from rl_core.selfcheck.torch.selfcheck import TOLERANCE, Expected, SelfCheck, case_on
from rl_dtensor.plugin import PLUGIN
from rl_dtensor.selfcheck import CHECK, MESHES, cases_of, shrink, write_tiny


def test_a_small_config_keeps_what_makes_the_family():
    small = shrink(AutoConfig.for_model("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 2
    assert (small.hidden_size, small.num_key_value_heads) == (32, 2)
    assert shrink(AutoConfig.for_model("phi")).num_key_value_heads == 4
    assert shrink(AutoConfig.for_model("mixtral")).num_local_experts == 4
    assert [shrink(AutoConfig.for_model(name)).num_experts_per_tok for name in ("mixtral", "llama4_text")] == [2, 1]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "opt", "phi3", "deepseek_v3", "mpt", "jamba", "phi4_multimodal"])
def test_every_family_is_shrunk_under_its_own_names_and_without_dropout(family):
    config = AutoConfig.for_model(family)
    small = shrink(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert small.vocab_size == 101
    assert small.num_hidden_layers == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert not [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p]


def test_layers_of_each_kind_stay_with_all_that_is_said_of_them():
    config = AutoConfig.for_model("smollm3", num_hidden_layers=8, no_rope_layer_interval=4)
    small = shrink(config)
    assert (small.num_hidden_layers, small.no_rope_layers, len(small.layer_types)) == (2, [1, 0], 2)


def test_a_family_that_refuses_to_be_tiny_is_told_as_such(tmp_path):
    with pytest.raises(ConfigError, match=r"a tiny dbrx model cannot be made, so this check cannot say: ValueError"):
        write_tiny(AutoConfig.for_model("dbrx"), tmp_path)


def test_a_model_that_stays_large_is_not_trained(tmp_path):
    with pytest.raises(ConfigError, match=r"a tiny blt model cannot be made.* it has \d+ parameters at the sizes"):
        write_tiny(AutoConfig.for_model("blt"), tmp_path)


def test_what_differs_is_off(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    expected = CHECK.expect(folder, has_adapters=False)
    case = case_on(MESHES, "1", is_packed=True, has_adapters=False)
    assert CHECK.check_case(ranks, folder, case, expected).verdict == "exact"
    name = next(iter(expected.weights))
    moved = Expected(expected.steps, {**expected.weights, name: expected.weights[name] + 1e-3})
    found = CHECK.check_case(ranks, folder, case, moved)
    assert found.verdict == "off"
    assert found.differences["loss"] <= TOLERANCE < found.differences["weights"]


def test_one_case_is_checked_where_one_is_asked_for(monkeypatch, tmp_path):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    case = case_on(MESHES, "tp2", is_packed=False, has_adapters=True)
    monkeypatch.setattr(
        SelfCheck,
        "check_family",
        lambda self, pool, folder, cases: (FamilyCase(each.mesh, each.layout, "exact") for each in cases),
    )
    found = list(resolve(PLUGIN.selfcheck)(str(tmp_path), case))
    assert [(each.mesh, each.layout) for each in found] == [("tp2", "padded, adapters")]


@pytest.mark.parametrize(
    ("model_type", "said"),
    [("nonesuch", "model type `nonesuch`"), ("vit", "is a vit model, and transformers has no language model")],
)
def test_a_model_of_no_language_family_is_refused(tmp_path, model_type, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=said) as caught:
        next(cases_of(str(tmp_path)))
    assert len(str(caught.value).splitlines()) == 1
