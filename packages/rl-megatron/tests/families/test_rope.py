"""Rotary embeddings have the frequencies and the scaling of transformers, or are refused before anything starts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layouts import FAMILIES, LATENT_FAMILIES, write_family
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as concentration,
)
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.model_config import ModelConfig
from rl_core.testing.exhaustive import exhaustive
from rl_megatron.checks import check_architecture
from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.families.rotary import inverse_frequencies, latent_settings, scaling_fields
from rl_megatron.families.supported import rotary_kinds
from rl_megatron.generation.plugin import MegatronGenerationConfig, check_layers

THETA = {"rope_theta": 1e4}
LINEAR = {**THETA, "rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    **THETA,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 4.0}
HALF = {"partial_rotary_factor": 0.5}
BY_KIND = "gemma3_text"
NO_LATENT = [family for family in FAMILIES if family not in (*LATENT_FAMILIES, BY_KIND)]
LENGTH = 40


def rotary_of(folder):
    """The rotary embedding of transformers and the config of a model."""
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config).model.rotary_emb, config


@pytest.mark.parametrize("family", NO_LATENT)
@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(THETA, id="default"),
        pytest.param({"rope_theta": 5e5}, id="another base"),
        pytest.param(LINEAR, id="linear"),
        pytest.param(LLAMA3, id="llama3"),
        pytest.param(YARN, id="yarn"),
        pytest.param({**YARN, "truncate": False}, id="yarn without rounding"),
        pytest.param({**YARN, "attention_factor": 0.9}, id="yarn with an explicit factor"),
        pytest.param({**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, id="yarn with different scales"),
    ],
)
def test_frequencies_and_scaling_are_those_of_transformers(tmp_path, family, rope):
    rotary, config = rotary_of(write_family(tmp_path, family, rope_parameters=dict(rope)))
    found = inverse_frequencies(config, family_of(config).rotary_dim(config))
    torch.testing.assert_close(found, rotary.inv_freq, rtol=1e-6, atol=0)
    scaling = concentration(SimpleNamespace(**scaling_fields(config)))
    assert scaling == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        pytest.param("llama", {**THETA, **HALF}, id="ignored"),
        pytest.param("glm4_moe", {**THETA, **HALF}, id="default"),
        pytest.param("qwen3_next", {**LINEAR, **HALF}, id="linear"),
        pytest.param("glm4_moe", {**LLAMA3, "partial_rotary_factor": 0.25}, id="llama3"),
    ],
)
def test_partly_rotated_heads_have_the_frequencies_of_transformers(tmp_path, family, rope):
    rotary, config = rotary_of(write_family(tmp_path, family, rope_parameters=dict(rope), head_dim=16))
    found = inverse_frequencies(config, family_of(config).rotary_dim(config))
    torch.testing.assert_close(found, rotary.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rope", [THETA, LINEAR, LLAMA3])
def test_each_kind_of_layer_has_the_frequencies_of_transformers(tmp_path, rope):
    parameters = {"full_attention": dict(rope), "sliding_attention": {**THETA, "rope_theta": 5e3}}
    rotary, config = rotary_of(write_family(tmp_path, BY_KIND, rope_parameters=parameters))
    assert rotary_kinds(config.rope_parameters) == ["full_attention", "sliding_attention"]
    for kind in rotary_kinds(config.rope_parameters):
        found = inverse_frequencies(config, family_of(config).rotary_dim(config), kind)
        torch.testing.assert_close(found, getattr(rotary, f"{kind}_inv_freq"), rtol=1e-6, atol=0)
    assert scaling_fields(config) == {}


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(THETA, id="default"),
        pytest.param(YARN, id="yarn", marks=exhaustive),
        pytest.param({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, id="as DeepSeek-V3 is published"),
        pytest.param({**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, id="different scales"),
        pytest.param({**YARN, "mscale": 0.7}, id="a scale that transformers ignores", marks=exhaustive),
        pytest.param({**YARN, "mscale_all_dim": 0.7}, id="a scale of attention alone", marks=exhaustive),
        pytest.param(
            {**YARN, "attention_factor": 0.9, "mscale_all_dim": 0.7}, id="an explicit factor", marks=exhaustive
        ),
        pytest.param({**YARN, "beta_fast": 16, "beta_slow": 2}, id="other bounds", marks=exhaustive),
    ],
)
def test_latent_attention_rotates_and_scales_as_transformers(ranks, tmp_path, rope):
    folder = write_family(tmp_path, "deepseek_v3", rope_parameters=dict(rope))
    rotary, config = rotary_of(folder)
    positions = torch.arange(LENGTH)[None]
    cosines, sines = rotary(torch.zeros(1), positions)
    layer = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    (found,) = ranks.run(
        "megatron_factories:latent_rotary", [(dict(latent_settings(config)), config.qk_rope_head_dim, LENGTH)]
    )
    np.testing.assert_allclose(found["cosines"], cosines[0], atol=1e-5)
    np.testing.assert_allclose(found["sines"], sines[0], atol=1e-5)
    assert found["attention_scale"] == pytest.approx(layer.scaling * layer.qk_head_dim**0.5, rel=1e-12)


REFUSED = {
    "yarn that shrinks": ("llama", {"rope_parameters": {**YARN, "factor": 0.5}}, "factor=0.5"),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, "of type 'longrope'"),
    "dynamic": ("qwen3_moe", {"rope_parameters": DYNAMIC}, "of type 'dynamic'"),
    "proportional": ("llama", {"rope_parameters": {**THETA, "rope_type": "proportional"}}, "of type 'proportional'"),
    "by kind of layer": ("qwen3", {"rope_parameters": {"full_attention": THETA}}, "for each kind of layer"),
    "in older names": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "of type 'dynamic'"),
    "too few frequencies": ("llama", {"rope_parameters": {**LINEAR, **HALF}}, "with partial_rotary_factor"),
    "latent linear": ("deepseek_v3", {"rope_parameters": LINEAR}, "of type 'linear'"),
    "latent without rounding": ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate=false"),
    "latent that shrinks": ("deepseek_v3", {"rope_parameters": {**YARN, "factor": 0.5}}, "factor=0.5"),
}
"""Type of the model, fields of its config, and a part of the message."""


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_others_are_refused_by_the_config_alone(tmp_path, family, fields, message):
    assert not list(check_architecture(section_of(tmp_path, family, {}), None))
    section = section_of(tmp_path, family, fields)
    for check, key in ((check_architecture, "model_name"), (check_layers, "generation.backend")):
        (problem,) = check(section, None)
        assert problem.key == key
        assert "rotary embedding " in problem.reason
        assert message in problem.reason + problem.allowed
        assert "rope_parameters in hf_config_overrides" in problem.remedy


def test_an_override_to_another_type_is_accepted(tmp_path):
    section = section_of(tmp_path, "llama", {"rope_parameters": LONGROPE}, {"rope_parameters": {"rope_type": "linear"}})
    assert not list(check_architecture(section, None))


def test_a_fused_embedding_that_leaves_scaling_out_is_refused(tmp_path):
    problems = {}
    for family in ("llama", "deepseek_v3"):
        section = section_of(tmp_path, family, {"rope_parameters": YARN}, megatron_kwargs={"apply_rope_fusion": True})
        problems[family] = [problem.key for problem in check_architecture(section, None)]
    assert problems == {"llama": ["megatron_cfg.megatron_kwargs.apply_rope_fusion"], "deepseek_v3": []}


def section_of(folder, family, fields, overrides=None, **settings):
    """A policy's section for a model of which only the config is on this machine."""
    latent = {"kv_lora_rank": 16} if family == "deepseek_v3" else {}
    (folder / "config.json").write_text(json.dumps({"model_type": family, "rope_theta": 1e4, **latent, **fields}))
    model = ModelConfig(model_name=str(folder), hf_config_overrides=overrides or {})
    return SimpleNamespace(
        model_name=model.model_name,
        hf_config_overrides=model.hf_config_overrides,
        megatron_cfg=MegatronConfig(**settings),
        generation=SimpleNamespace(megatron_cfg=MegatronGenerationConfig()),
    )
