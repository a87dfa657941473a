"""The files of an adapter say which layers have one, to whoever reads them by the rules of peft."""

import json

import pytest

from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.torch.training.peft_form import adapter_config, endings

LAYERS = [f"model.layers.{number}.{name}" for number in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")]


def test_layers_are_named_by_their_last_part_if_no_other_layer_has_it():
    assert endings(LAYERS, ["lm_head", "model.norm", "model.layers.0.self_attn.v_proj"]) == ["q_proj", "up_proj"]
    assert endings(LAYERS, []) == ["q_proj", "up_proj"]


def test_layers_whose_last_part_another_has_too_are_named_in_full():
    others = ["model.layers.2.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj"]
    assert endings(LAYERS, others) == sorted(LAYERS)
    assert endings(LAYERS, others[1:]) == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "q_proj"]


@pytest.mark.parametrize(("role", "task", "saved"), [("policy", "CAUSAL_LM", None), ("critic", "SEQ_CLS", ["score"])])
def test_the_config_holds_what_peft_needs_as_json(role, task, saved):
    lora = LoraConfig(enabled=True, dim=4, alpha=8, dropout=0.1, use_rslora=True)
    written = adapter_config(ModelConfig(model_name="org/base", lora_cfg=lora), role, ["q_proj"])
    read = json.loads(json.dumps(written))
    assert read["base_model_name_or_path"] == "org/base"
    assert (read["r"], read["lora_alpha"], read["lora_dropout"], read["use_rslora"]) == (4, 8, 0.1, True)
    assert isinstance(read["lora_alpha"], int)
    assert (read["task_type"], read["modules_to_save"], read["target_modules"]) == (task, saved, ["q_proj"])
