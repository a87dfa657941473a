"""The self-check tells right from wrong, and what cannot be from what is."""

import json

import pytest
from transformers import AutoConfig

from rl_core.errors import ConfigError
from rl_core.plugins import resolve
from rl_core.selfcheck.torch.selfcheck import TOLERANCE, all_cases, case_on
from rl_core.testing.exhaustive import exhaustive
from rl_megatron.plugin import PLUGIN
from rl_megatron.selfcheck import CHECK, LAYOUTS, write_tiny


@exhaustive
def test_a_family_is_right_where_it_trains_as_one_process_does(ranks, tmp_path):
    layouts = {name: LAYOUTS[name] for name in ("tp2+sp", "ep2")}
    folder = write_tiny(AutoConfig.for_model("qwen2"), tmp_path)
    cases = list(CHECK.check_family(ranks, folder, all_cases(layouts)))
    assert [case.layout for case in cases] == ["packed, full", "padded, full", "packed, adapters"] * 2
    assert [case.verdict for case in cases] == ["exact"] * 3 + ["refused"] * 3, cases
    assert all("has no experts" in case.reason for case in cases[3:])


def test_what_differs_is_off(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3_moe"), tmp_path / "model")
    expected = CHECK.expect(folder, has_adapters=False)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    moved = expected._replace(weights={**expected.weights, name: expected.weights[name] + 1e-3})
    case = case_on(LAYOUTS, "1", is_packed=True, has_adapters=False)
    assert CHECK.check_case(ranks, folder, case, expected).verdict == "exact"
    found = CHECK.check_case(ranks, folder, case, moved)
    assert found.verdict == "off"
    assert found.differences["loss"] <= TOLERANCE < found.differences["weights"]


def test_a_family_without_maps_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="no weight mapping for models of type 'gpt2'"):
        next(resolve(PLUGIN.selfcheck)(str(tmp_path)))
