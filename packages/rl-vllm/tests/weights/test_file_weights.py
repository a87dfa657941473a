"""Comparison of the weights in a model's files with those that vLLM's model of its family loads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spoilable_generator import SpoilableGenerator
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.config import plain
from rl_core.errors import GeneratorError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE
from rl_core.testing.weights import model_config
from rl_core.torch.quantization.files import quantise
from rl_core.torch.quantization.formats import weight_format
from rl_vllm import VllmConfig, preflight

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WITH_BIAS = {"attention_bias": True}
FILE = "model.safetensors"


def write(folder: Path, family: str, **fields: Any) -> Path:
    config = AutoConfig.for_model(family, **{**SIZES, **fields})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def problems(folder: Path, **settings: Any) -> list[str]:
    model = ModelConfig(model_name=str(folder), precision="float32", max_total_sequence_length=64, **settings)
    return preflight.problems({**plain(model), "generation": {"vllm_cfg": plain(VllmConfig())}})


@pytest.mark.parametrize(
    ("family", "fields", "left_out"),
    [
        ("qwen3", WITH_BIAS, "layers.0.self_attn.o_proj.bias"),
        ("qwen3_moe", {**EXPERTS, **WITH_BIAS}, "layers.0.self_attn.o_proj.bias"),
        ("olmoe", {**EXPERTS, **WITH_BIAS}, "layers.0.self_attn.k_proj.bias"),
        ("cohere", WITH_BIAS, "layers.0.self_attn.k_proj.bias"),
        ("gemma", WITH_BIAS, "layers.0.self_attn.k_proj.bias"),
        ("ernie4_5", {"use_bias": True}, "layers.0.mlp.down_proj.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_weights_that_vllm_has_no_parameter_for_are_refused_before_anything_starts(
    tmp_path: Path, family: str, fields: dict[str, Any], left_out: str
) -> None:
    (found,) = problems(write(tmp_path, family, **fields))
    assert found.startswith("model_name: vLLM does not load")
    assert left_out in found
    assert "policy.generation.backend=hf" in found


@pytest.mark.parametrize("fields", [{}, WITH_BIAS])
def test_quantised_files_are_compared_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    source, target = write(tmp_path / "source", "qwen3", **fields), tmp_path / "quantised"
    target.mkdir()
    quantise(source, target, weight_format("float8", 32))
    assert ["o_proj.bias" in each for each in problems(target)] == [True] * bool(fields)


def test_weights_that_vllm_waits_for_are_refused(tmp_path: Path) -> None:
    (found,) = problems(write(tmp_path, "qwen2_moe", **EXPERTS, qkv_bias=False))
    assert "vLLM needs and the files lack model.layers.0.self_attn.k_proj.bias" in found


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {**WITH_BIAS, "mlp_bias": True}),
        ("qwen3_moe", EXPERTS),
        ("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    ],
)
def test_a_family_whose_weights_are_all_loaded_is_accepted(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    assert problems(write(tmp_path, family, **fields)) == []


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.mlp.up_proj.weight", "mtp.norm.weight"]
)
def test_tensors_that_transformers_leaves_out_count_for_nothing(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, "qwen3")
    save_file({**load_file(folder / FILE), name: torch.ones(8)}, folder / FILE, {"format": "pt"})
    assert problems(folder) == []


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_tied_head_is_refused_only_if_the_files_hold_another_one(tmp_path: Path, is_apart: bool) -> None:
    folder = write(tmp_path, "qwen3", tie_word_embeddings=True)
    weights = load_file(folder / FILE)
    head = weights["model.embed_tokens.weight"].clone()
    head[-1, -1] += is_apart
    save_file({**weights, "lm_head.weight": head}, folder / FILE, {"format": "pt"})
    found = problems(folder)
    assert bool(found) == is_apart
    assert all("policy.hf_config_overrides={tie_word_embeddings: false}" in each for each in found)
    assert problems(folder, hf_config_overrides={"tie_word_embeddings": False}) == []


def test_an_engine_that_loaded_other_weights_than_the_files_have_does_not_start(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3", **WITH_BIAS)
    settings = GenerationConfig(), VllmConfig(kv_cache_gib=0.25)
    generator = SpoilableGenerator(*settings, model_config(folder), Placement("cpu"))
    with pytest.raises(GeneratorError, match=r"vLLM does not load model\.layers\.0\.self_attn\.o_proj\.bias"):
        asyncio.run(generator.start())
