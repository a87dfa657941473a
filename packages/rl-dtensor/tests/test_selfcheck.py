"""The self-check shrinks a family's config and tells right from wrong."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import ConfigError, WorkerError
from rl_core.plugins import resolve
from rl_dtensor import selfcheck
from rl_dtensor.plugin import PLUGIN
from rl_dtensor.selfcheck import (
    MESHES,
    TOLERANCE,
    Expected,
    Outcome,
    all_cases,
    case_on,
    cases_of,
    check_case,
    check_family,
    expect,
    shrink,
    write_tiny,
)


def test_a_small_config_keeps_what_makes_the_family():
    small = shrink(AutoConfig.for_model("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 2
    assert (small.hidden_size, small.num_key_value_heads) == (32, 2)
    assert shrink(AutoConfig.for_model("phi")).num_key_value_heads == 4
    assert shrink(AutoConfig.for_model("mixtral")).num_local_experts == 4


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "opt", "phi3", "deepseek_v3", "mpt", "jamba"])
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
    with pytest.raises(ConfigError, match=r"a tiny dots1 model cannot be made, so this check cannot say: TypeError"):
        write_tiny(AutoConfig.for_model("dots1"), tmp_path)


def test_a_family_that_one_process_cannot_train_is_refused_case_by_case(monkeypatch, tmp_path):
    def only_whole(folder, *, lora):
        if lora:
            raise ValueError("no linear layers")
        return expect(folder, lora=lora)

    monkeypatch.setattr(selfcheck, "expect", only_whole)
    monkeypatch.setattr(selfcheck, "check_case", lambda pool, folder, case, expected: Outcome(case))
    found = list(check_family(None, AutoConfig.for_model("qwen3"), tmp_path, all_cases()))
    assert {each.case.has_adapters for each in found if each.refused} == {True}
    assert all("no linear layers" in each.refused for each in found if each.case.has_adapters)


def test_what_differs_is_off(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    expected = expect(folder, lora=False)
    case = case_on("1", is_packed=True, has_adapters=False)
    assert not check_case(ranks, folder, case, expected).is_off(TOLERANCE)
    name = next(iter(expected.weights))
    moved = Expected(expected.steps, {**expected.weights, name: expected.weights[name] + 1e-3})
    found = check_case(ranks, folder, case, moved)
    assert found.is_off(TOLERANCE)
    assert found.loss <= TOLERANCE < found.weights
    assert Outcome(case, loss=float("nan")).is_off(TOLERANCE)
    assert Outcome(case, inexact=("lm_head.weight",)).is_off(TOLERANCE)


def test_cases_are_told_as_plain_data(monkeypatch, tmp_path):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    case = case_on("tp2", is_packed=False, has_adapters=True)
    outcomes = [
        Outcome(case, loss=1e-7),
        Outcome(case, weights=1e-3, inexact=("lm_head.weight",)),
        Outcome(case, refused="no tensor-parallel plan"),
        Outcome(case, failed="pool rank 0: builtins.RuntimeError: shapes differ"),
    ]
    monkeypatch.setattr(selfcheck, "check_family", lambda pool, config, workspace, cases: iter(outcomes))
    found = list(resolve(PLUGIN.selfcheck)(str(tmp_path)))
    assert {(each.mesh, each.layout) for each in found} == {("tp2", "padded, adapters")}
    assert [each.verdict for each in found] == ["exact", "off", "refused", "off"]
    assert found[0].differences == {"loss": 1e-7, "grad_norm": 0.0, "weights": 0.0}
    assert found[1].names == ("lm_head.weight",)
    assert found[2].reason == "no tensor-parallel plan"
    assert "shapes differ" in found[3].reason


@pytest.mark.parametrize(
    ("model_type", "said"),
    [("nonesuch", "model type `nonesuch`"), ("vit", "is a vit model, and transformers has no language model")],
)
def test_a_model_of_no_language_family_is_refused(tmp_path, model_type, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=said) as caught:
        next(cases_of(str(tmp_path)))
    assert len(str(caught.value).splitlines()) == 1


def test_a_rank_that_fails_is_a_failed_case_and_the_others_are_tried(monkeypatch, tmp_path):
    def one_mesh_fails(pool, folder, case, expected):
        if case.mesh == "tp2":
            raise WorkerError("builtins.RuntimeError", "shapes differ", "far away")
        if case.mesh == "cp2":
            raise WorkerError("builtins.ValueError", "cannot be cut", "far away")
        return Outcome(case)

    monkeypatch.setattr(selfcheck, "check_case", one_mesh_fails)
    found = {str(each.case): each for each in check_family(None, AutoConfig.for_model("qwen3"), tmp_path, all_cases())}
    assert len(found) == 3 * len(MESHES)
    assert found["tp2, packed, full"].is_off(TOLERANCE)
    assert found["tp2, packed, full"].failed == "builtins.RuntimeError: shapes differ"
    assert not found["cp2, packed, full"].is_off(TOLERANCE)
    assert found["cp2, packed, full"].refused == "cannot be cut"
