"""Recipes against the shapes of the models that they name, which no machine needs to have for this."""

import json

import pytest
from safetensors_files import write_weights

from rl_core.devices import CUDA
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.recipes import recipe_names
from rl_launch.root_config import section_of
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan

SHAPES = {
    # model: hidden layers, attention heads, heads of keys and values, experts, positions
    "Qwen/Qwen2.5-1.5B": (28, 12, 2, 0, 131072),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 12, 2, 0, 32768),
    "Qwen/Qwen2.5-7B": (28, 28, 4, 0, 131072),
    "Qwen/Qwen2.5-7B-Instruct": (28, 28, 4, 0, 32768),
    "Qwen/Qwen2.5-VL-3B-Instruct": (36, 16, 2, 0, 128000),
    "Qwen/Qwen2.5-VL-7B-Instruct": (28, 28, 4, 0, 128000),
    "Qwen/Qwen2.5-32B": (64, 40, 8, 0, 131072),
    "Qwen/Qwen2.5-Math-7B": (28, 28, 4, 0, 4096),
    "Qwen/Qwen3-30B-A3B": (48, 32, 4, 128, 40960),
    "Qwen/Qwen3-32B": (64, 64, 8, 0, 40960),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 32, 8, 0, 262144),
    "deepseek-ai/DeepSeek-V3": (61, 128, 128, 256, 163840),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (28, 12, 2, 0, 131072),
    "meta-llama/Llama-3.1-8B": (32, 32, 8, 0, 131072),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 32, 8, 0, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": (80, 64, 8, 0, 131072),
}
"""As published in each model's `config.json`."""

FIELDS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "max_position_embeddings")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def folder_of(name, folder):
    """A folder that passes for the model's, as far as checks without an engine look."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path / "model.safetensors")
    (path / "tokenizer.json").touch()
    shape = dict(zip(FIELDS, SHAPES[name], strict=True))
    kind = {"model_type": "qwen2_5_vl", "image_token_id": 151655} if "VL" in name else {"model_type": "qwen3"}
    if name.endswith("DeepSeek-V3"):
        kind = {"model_type": "deepseek_v3", "n_routed_experts": shape.pop("num_experts")}
    (path / "config.json").write_text(json.dumps({**kind, **shape}))
    return path


@pytest.mark.parametrize("recipe", recipe_names())
def test_meshes_and_lengths_of_a_recipe_fit_its_models(recipe, tmp_path):
    config = read_plan(recipe).config
    names = {key: section_of(config, key).model_name for key in RunPlan.of(config).model_sections}
    hub = {key: name for key, name in names.items() if name not in MADE_HERE}
    assert set(hub.values()) <= SHAPES.keys(), "give the shape of the model of this recipe"
    local = [f"{key}.model_name={folder_of(name, tmp_path)}" for key, name in hub.items()]
    config = read_plan(recipe, local).config
    for key, name in hub.items():
        positions = dict(zip(FIELDS, SHAPES[name], strict=True))["max_position_embeddings"]
        assert section_of(config, key).max_total_sequence_length <= positions


def test_a_mesh_that_does_not_divide_its_model_is_found(tmp_path):
    folder = folder_of("Qwen/Qwen2.5-32B", tmp_path)
    with pytest.raises(ValueError, match="does not divide"):
        read_plan("grpo-math-32b", [f"policy.model_name={folder}", "policy.dtensor_cfg.tensor_parallel_size=16"])


def test_replicas_of_deepseek_v3_are_over_four_nodes_each(tmp_path):
    folder = folder_of("deepseek-ai/DeepSeek-V3", tmp_path)
    plan = read_plan("grpo-deepseek-v3-megatron", [f"policy.model_name={folder}"])
    topology = plan.backends.topology(64, 8, CUDA)
    assert (topology.replica_ranks, topology.replica_nodes, topology.num_replicas) == (32, 4, 16)
    assert topology.devices("policy").count == 512


def test_several_engines_of_a_dense_model_are_refused(tmp_path):
    folder = folder_of("Qwen/Qwen2.5-32B", tmp_path)
    with pytest.raises(ValueError, match="is for mixtures of experts, and the model has none"):
        read_plan("grpo-math-32b", [f"policy.model_name={folder}", "policy.generation.vllm_cfg.data_parallel_size=2"])
