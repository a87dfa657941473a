"""A folder with an adapter is read without the libraries that load it."""

import json

import pytest

from rl_core.errors import ConfigError
from rl_core.model_config import LoraConfig
from rl_launch.model_files.adapter_folder import AdapterFolder, initial_adapter_problems

CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8, "use_rslora": True}
LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj")


def write(folder, layers=LAYERS, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    entry = {"dtype": "F32", "data_offsets": [0, 0]}
    shapes = {"lora_A": [4, 8], "lora_B": [8, 4]}
    header = {
        f"base_model.model.{layer}.{factor}.weight": {**entry, "shape": shape}
        for layer in layers
        for factor, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def test_a_config_starts_from_an_adapter_with_its_settings(tmp_path):
    found = AdapterFolder.read(write(tmp_path))
    assert (found.base, found.layers) == ("org/base", LAYERS)
    lora = LoraConfig(**found.settings())
    assert (lora.dim, lora.alpha, lora.use_rslora, lora.target_modules) == (4, 8.0, True, list(LAYERS))
    assert list(initial_adapter_problems("policy.lora_cfg", lora)) == []


def test_adapters_of_stacked_experts_are_told_from_those_of_linear_layers(tmp_path):
    experts = "model.layers.0.mlp.experts"
    stacks = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    layers = (*LAYERS, experts, f"{experts}.base_layer")
    lora = LoraConfig(**AdapterFolder.read(write(tmp_path, layers, target_parameters=stacks)).settings())
    assert (lora.target_modules, lora.target_parameters) == (list(LAYERS), stacks)


def test_settings_that_differ_from_the_adapters_are_named(tmp_path):
    lora = LoraConfig(enabled=True, dim=8, alpha=8, adapter=str(write(tmp_path)))
    found = {problem.key: problem for problem in initial_adapter_problems("policy.lora_cfg", lora)}
    assert found.keys() == {"policy.lora_cfg.dim", "policy.lora_cfg.use_rslora"}
    assert found["policy.lora_cfg.dim"].got == 8
    assert found["policy.lora_cfg.dim"].remedy.endswith(" 4")
    (problem,) = initial_adapter_problems("key", LoraConfig(enabled=True, adapter=str(tmp_path / "none")))
    assert "adapter_config.json" in problem.reason


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        pytest.param(
            {"rank_pattern": {"q_proj": 2}},
            "rank_pattern",
            'Set it to {"q_proj": 2}',
            id="mixed ranks [huggingface/diffusers#14409]",
        ),
        ({"alpha_pattern": {".*q_proj": 3}}, "alpha_pattern", 'Set it to {".*q_proj": 3.0}'),
        pytest.param({"use_dora": True}, "use_dora", "Set it to True", id="DoRA [vllm-project/vllm#6983]"),
    ],
)
def test_sizes_and_magnitudes_of_an_adapter_are_taken_or_compared(tmp_path, changes, key, remedy):
    found = AdapterFolder.read(write(tmp_path, **changes))
    lora = LoraConfig(**found.settings())
    assert getattr(lora, key) == next(iter(changes.values()))
    assert list(initial_adapter_problems("policy.lora_cfg", lora)) == []
    plain = {name: value for name, value in found.settings().items() if name != key}
    (problem,) = initial_adapter_problems("policy.lora_cfg", LoraConfig(**plain))
    assert (problem.key, problem.remedy) == (f"policy.lora_cfg.{key}", remedy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(
            {"modules_to_save": ["score"]},
            "an adapter with modules_to_save",
            id="whole modules [hiyouga/LlamaFactory#9545]",
        ),
        pytest.param({"init_lora_weights": "pissa"}, "init_lora_weights=pissa", id="PiSSA [huggingface/peft#2184]"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights=pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights=loftq"),
        ({"init_lora_weights": "corda"}, "init_lora_weights=corda"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga"),
        ({"init_lora_weights": "mica"}, "init_lora_weights=mica"),
        ({"alpha_pattern": {"q_proj": None}}, "is not the config of a low-rank adapter"),
        pytest.param({"bias": "lora_only"}, "bias=lora_only", id="biases [huggingface/peft#3306]"),
        pytest.param({"lora_bias": True}, "lora_bias", id="biases of factors [vllm-project/vllm#5733]"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "an adapter with modules_to_save"),
        ({"use_bdlora": {"target_modules_bd_a": ["q_proj"]}}, "use_bdlora"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"a_field_of_a_later_peft": {"x": 1}}, "a_field_of_a_later_peft"),
        ({"layers": (*LAYERS, "lm_head")}, r"adapts the head \(lm_head\)"),
        ({"layers": (*LAYERS, "score")}, r"adapts the head \(score\)"),
        ({"r": None}, "is not the config of a low-rank adapter"),
        ({"layers": ()}, "has no factors of layers"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        AdapterFolder.read(write(tmp_path, **changes))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param("base_model.model.lm_head.weight", id="a head [vllm-project/vllm#9280]"),
        "base_model.model.embed.lora_embedding_A",
    ],
)
def test_tensors_that_are_not_factors_of_layers_are_refused(tmp_path, tensor):
    write(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    header = json.loads(file.read_bytes()[8:])
    header[tensor] = {"dtype": "F32", "data_offsets": [0, 0], "shape": [0]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ConfigError, match=f"not factors of linear layers, such as {tensor}"):
        AdapterFolder.read(tmp_path)


def test_what_peft_writes_for_a_plain_adapter_is_read(tmp_path):
    plain = {"bias": "none", "init_lora_weights": True, "lora_bias": False, "rank_pattern": {}, "loftq_config": {}}
    assert AdapterFolder.read(write(tmp_path, peft_version="0.21.2", task_type="CAUSAL_LM", **plain)).dim == 4


def test_weights_of_linear_layers_that_are_named_as_parameters_are_layers(tmp_path):
    """Runs name so the layers that peft would take for experts."""
    weights = [f"{LAYERS[0]}.weight"]
    lora = LoraConfig(**AdapterFolder.read(write(tmp_path, target_parameters=weights)).settings())
    assert (lora.target_modules, lora.target_parameters) == (list(LAYERS), [])
