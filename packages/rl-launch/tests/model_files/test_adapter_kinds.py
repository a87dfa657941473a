"""Adapters of every type of `peft` are accepted, or refused by name."""

import json

import pytest

from rl_core.errors import ConfigError
from rl_core.model_config import LoraConfig
from rl_launch.model_files.adapter_folder import AdapterFolder, initial_adapter_problems

LAYER = "model.layers.0.self_attn.q_proj"

OTHER_TYPES = (
    ({"peft_type": "LOHA", "r": 8, "alpha": 8, "module_dropout": 0.0}, "merge it with peft"),
    ({"peft_type": "LOKR", "r": 8, "alpha": 8}, "merge it with peft"),
    ({"peft_type": "ADALORA", "r": 8, "lora_alpha": 8, "target_r": 8}, "merge it with peft"),
    ({"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}, "merge it with peft"),
    ({"peft_type": "OFT", "r": 8, "oft_block_size": 0}, "merge it with peft"),
    ({"peft_type": "VERA", "r": 256, "d_initial": 0.1}, "merge it with peft"),
    ({"peft_type": "TRAINABLE_TOKENS", "token_indices": [1]}, "merge it with peft"),
    ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}, "pass a LoRA adapter"),
    ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, "pass a LoRA adapter"),
    ({"peft_type": "P_TUNING", "num_virtual_tokens": 4}, "pass a LoRA adapter"),
)
"""Fields of each config as peft writes them, most without those of LoRA, and the advice."""


@pytest.mark.parametrize(("config", "advice"), OTHER_TYPES, ids=[config["peft_type"] for config, _ in OTHER_TYPES])
def test_adapters_of_another_type_are_refused_by_name(tmp_path, config, advice):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    says = f"{tmp_path} is an adapter with peft_type={config['peft_type']}, which is not supported; {advice}"
    with pytest.raises(ConfigError) as error:
        AdapterFolder.read(tmp_path)
    assert str(error.value).startswith(says)
    (problem,) = initial_adapter_problems("policy.lora_cfg", LoraConfig(enabled=True, adapter=str(tmp_path)))
    assert problem.key == "policy.lora_cfg.adapter"
    assert problem.message == str(error.value)


@pytest.mark.parametrize("content", ["[]", "null", "{", '{"r": "many", "lora_alpha": 8}'])
def test_a_config_that_is_not_one_of_an_adapter_is_refused(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match="is not the config of a low-rank adapter"):
        AdapterFolder.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"fan_in_fan_out": True},  # as peft saves it for GPT-2
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"lora_dropout": 0.1},
    ],
    ids=str,
)
def test_fields_that_leave_an_adapter_plain_are_accepted(tmp_path, changes):
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8, **changes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    entry = {"dtype": "F32", "data_offsets": [0, 0]}
    shapes = {"lora_A": [4, 8], "lora_B": [8, 4]}
    header = {f"base_model.model.{LAYER}.{name}.weight": {**entry, "shape": shape} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert AdapterFolder.read(tmp_path).layers == (LAYER,)
