"""Models and layouts that are refused before a rank is there: by the driver, in the worker's environment, and alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from layouts import EP, ETP, EXPERT_FAMILIES, EXPERT_LAYOUTS, FAMILIES, LAYOUTS, PP, SHARED_KEYS_LAYOUTS, TP, VPP
from transformers import AutoConfig

from rl_core.config import Problem, plain
from rl_core.model_config import LoraConfig, ModelConfig, VisionConfig
from rl_core.torch.vision.families import VISION_FAMILIES
from rl_megatron import preflight
from rl_megatron.checks import check_architecture
from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import BUILT_IN, family_of
from rl_megatron.families.supported import (
    RULES,
    WITH_IMAGES,
    architecture_problems,
    image_problems,
    num_key_heads,
    sizes_of,
)

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SP = {TP: 2, "sequence_parallel": True}
WITHOUT_INTERLEAVE = {"rope_interleave": False}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
CHUNKED = {"layer_types": ["full_attention", "chunked_attention"] * 2}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
}


YARN_IN_FULL = {
    "rope_parameters": {
        "full_attention": YARN["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}


def fields_of(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SMALL, **FAMILIES.get(family, {}), **fields}


def model_of(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig(model_name=str(folder), precision="float32")


def seen_by_driver(model: ModelConfig, settings: dict[str, Any]) -> list[Problem]:
    section = SimpleNamespace(
        model_name=model.model_name,
        hf_config_overrides=model.hf_config_overrides,
        lora_cfg=model.lora_cfg,
        megatron_cfg=MegatronConfig(enabled=True, **settings),
    )
    return list(check_architecture(section, None))


def seen_by_preflight(model: ModelConfig, settings: dict[str, Any]) -> list[str]:
    return preflight.check({**plain(model), "megatron_cfg": plain(MegatronConfig(enabled=True, **settings))})


@pytest.mark.parametrize(
    ("family", "fields", "settings", "mention"),
    [
        ("qwen3", {"num_hidden_layers": 3}, {PP: 2}, "3 layers that cannot be spread evenly over 2 pipeline ranks"),
        ("qwen3", {"num_hidden_layers": 6}, {PP: 2, VPP: 2}, "in 4 parts"),
        ("qwen3", {}, {PP: 2, "num_layers_in_first_pipeline_stage": 4}, "leaves 0"),
        ("qwen3", {}, {PP: 5}, "only 4 layers"),
        ("qwen3", {}, {TP: 3}, "num_attention_heads (4)"),
        ("qwen3", {"intermediate_size": 51}, {TP: 2}, "intermediate_size (51)"),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4}, {TP: 6}, "num_key_value_heads (4)"),
        ("qwen3", {}, {EP: 2}, "has no experts"),
        ("qwen3", {}, {"moe_router_bias_update_rate": 0.1}, "have no biases"),
        ("qwen3_moe", {}, {"moe_router_bias_update_rate": 0.1}, "have no biases"),
        ("qwen3_moe", {}, {TP: 2}, "needs sequence_parallel=true"),
        ("qwen3_moe", {}, {EP: 3}, "experts (4)"),
        ("qwen3_moe", {"moe_intermediate_size": 25}, SP, "expert size (25)"),
        ("mixtral", {"intermediate_size": 50}, {**SP, TP: 4}, "intermediate_size (50)"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 41}, SP, "shared expert size (41)"),
        ("deepseek_v3", {"moe_intermediate_size": 25}, {**SP, EP: 2, ETP: 1}, "shared expert size (25)"),
        ("glm4_moe", {"moe_intermediate_size": 25}, {**SP, EP: 2, ETP: 1}, "shared expert size (25)"),
        ("qwen3_next", {"linear_num_key_heads": 1, "linear_num_value_heads": 2}, SP, "linear_num_key_heads (1)"),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act=gelu"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}, "attention_bias and mlp_bias=true"),
        ("qwen3", {"attention_bias": True}, {}, "attention_bias=true"),
        ("deepseek_v3", {"attention_bias": True}, {}, "attention_bias=true"),
        ("deepseek_v3", WITHOUT_INTERLEAVE, {}, "rope_interleave=false"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, {}, "best 2"),
        ("deepseek_v3", {"norm_topk_prob": False}, {}, "norm_topk_prob=False"),
        ("glm4_moe", {"norm_topk_prob": False}, {}, "norm_topk_prob=False"),
        ("qwen2", CHUNKED, {}, "layers of type chunked_attention"),
        ("gpt_oss", {}, SP, "must be 1 for a gpt_oss model"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, {}, "swiglu_alpha=1.5"),
        ("gpt_oss", {"attention_bias": False}, {}, "attention_bias=false"),
        ("gemma3_text", {"hidden_activation": "gelu"}, {}, "hidden_activation=gelu"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", YARN_IN_FULL, {}, "of type 'yarn' in one kind of layers"),
        ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 2}, SP, "linear_num_key_heads (1)"),
        ("qwen3", DYNAMIC, {}, "of type 'dynamic'"),
        ("deepseek_v3", {**DYNAMIC}, {}, "of type 'dynamic'"),
    ],
)
def test_the_driver_refuses_what_building_the_model_would(
    tmp_path: Path, family: str, fields: dict[str, Any], settings: dict[str, Any], mention: str
) -> None:
    model = model_of(tmp_path, fields_of(family, **fields))
    (problem, *_) = seen_by_driver(model, settings)
    assert mention in problem.reason
    assert seen_by_preflight(model, settings) == [f"{problem.key}: {problem.message}"]


@pytest.mark.parametrize(
    ("family", "lora", "settings", "mention"),
    [
        ("gemma2", {}, {}, "no weight mapping for models of type 'gemma2'"),
        ("qwen3", {}, {"recompute": "selective", "recompute_modules": ["moe"]}, "recompute_modules ['moe']"),
        ("qwen3", {"match_all_linear": False, "target_modules": ["c_attn"]}, {}, "'c_attn' is not a linear layer"),
        (
            "qwen3",
            {},
            {PP: 2, "megatron_kwargs": {"pipeline_model_parallel_layout": "Ettt|L"}},
            "does not fit the model or the layout",
        ),
        ("qwen3", {}, {"transformer_engine": True}, "it is not installed"),
    ],
)
def test_what_needs_the_workers_environment_is_refused_there_before_a_rank_is_built(
    tmp_path: Path, family: str, lora: dict[str, Any], settings: dict[str, Any], mention: str
) -> None:
    model = model_of(tmp_path, fields_of(family))
    if lora:
        model = model.model_copy(update={"lora_cfg": LoraConfig(enabled=True, **lora)})
    (problem,) = seen_by_preflight(model, settings)
    assert mention in problem


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_that_a_family_is_trained_on_is_accepted(tmp_path: Path, family: str) -> None:
    fields = fields_of(family)
    model = model_of(tmp_path, fields)
    has_experts = family in EXPERT_FAMILIES
    layouts = {**LAYOUTS, **SHARED_KEYS_LAYOUTS, **(EXPERT_LAYOUTS if has_experts else {})}
    for _, settings in layouts.values():
        if has_experts and settings.get(TP, 1) > 1:
            settings = {**settings, "sequence_parallel": True}
        if settings.get(TP, 1) > fields.get("linear_num_key_heads", 4):
            continue
        if family == "gpt_oss" and settings.get(ETP, settings.get(TP, 1)) > 1:
            continue
        assert seen_by_driver(model, settings) == []
        assert seen_by_preflight(model, settings) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_from_the_fields_of_a_file_are_those_of_megatrons_config(family: str) -> None:
    fields = fields_of(family)
    hf = AutoConfig.for_model(**fields)
    assert sizes_of(fields, None) == sizes_of(hf.to_dict(), family_of(hf).settings(hf))
    assert num_key_heads(fields) == num_key_heads(hf.to_dict())


def test_a_family_that_megatron_cannot_run_here_is_refused_with_the_reason() -> None:
    (problem,) = architecture_problems({"model_type": "nemotron_h"}, MegatronConfig())
    assert "is a nemotron_h model" in problem.reason
    assert "Mamba layers of megatron-core 0.16.1 run only on the CUDA kernels" in problem.reason
    with pytest.raises(ValueError, match=r"'nemotron_h' are not supported: the Mamba layers.*train with rl-dtensor"):
        family_of(AutoConfig.for_model("nemotron_h"))


def test_every_family_has_rules() -> None:
    assert set(RULES) == set(BUILT_IN)


@pytest.mark.parametrize(
    ("vision", "settings", "kind", "key"),
    [
        ({}, {}, "gemma3", "vision.enabled"),
        ({"tower": "adapters"}, {}, "qwen2_5_vl", "vision.tower"),
        ({"max_pixels": 100}, {}, "internvl", "vision.max_pixels"),
        ({}, {"fp8_cfg": {"enabled": True}}, "qwen3_vl", "megatron_cfg.fp8_cfg.enabled"),
        (
            {},
            {"megatron_kwargs": {"apply_rope_fusion": True}},
            "qwen2_vl",
            "megatron_cfg.megatron_kwargs.apply_rope_fusion",
        ),
        ({"enabled": False}, {}, "qwen2_vl", "vision.enabled"),
    ],
)
def test_settings_of_images_that_cannot_run_are_named(vision, settings, kind, key) -> None:
    lora = LoraConfig(enabled=vision.get("tower") == "adapters")
    model = ModelConfig(model_name="a", vision=VisionConfig(**{"enabled": True, **vision}), lora_cfg=lora)
    (problem,) = image_problems(model, MegatronConfig(**settings), {"model_type": kind})
    assert problem.key == key


def test_families_with_images_are_accepted() -> None:
    model = ModelConfig(model_name="a", vision=VisionConfig(enabled=True))
    for kind in WITH_IMAGES:
        assert kind in VISION_FAMILIES
        assert not list(image_problems(model, MegatronConfig(), {"model_type": kind}))
