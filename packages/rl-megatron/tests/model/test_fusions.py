"""Fused kernels that a model is built with, with Transformer Engine and without."""

import pytest
import torch
from layouts import write_family
from transformers import AutoConfig

from rl_megatron.config import MegatronConfig
from rl_megatron.model import architecture
from rl_megatron.model.architecture import transformer_config
from rl_megatron.transformer_fields import FUSIONS

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DENSE = {"apply_rope_fusion", "use_te_activation_func", "bias_dropout_fusion"}
ROUTED = {
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
}
LATENT = ROUTED - {"apply_rope_fusion"}


pytestmark = pytest.mark.usefixtures("engine_kernels")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: AutoConfig.from_pretrained(write_family(folder / name, name))
        for name in ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
    }


def fused(hf, *, is_cuda=True, has_te=True, kwargs=None, **settings):
    backend = MegatronConfig(megatron_kwargs=kwargs or {}, **settings)
    config = transformer_config(hf, backend, dtype=torch.bfloat16, is_cuda=is_cuda, has_te=has_te)
    return {name for name in FUSIONS if getattr(config, name)}


@pytest.mark.parametrize(
    ("family", "expected"), [("qwen3", DENSE), ("qwen3_moe", ROUTED), ("glm4_moe", ROUTED), ("deepseek_v3", LATENT)]
)
def test_fusions_are_on_with_transformer_engine_and_off_without(configs, family, expected):
    assert fused(configs[family]) == expected
    assert fused(configs[family], has_te=False) == {"bias_activation_fusion", "bias_dropout_fusion"}
    assert fused(configs[family], is_cuda=False, has_te=False) == set()


@pytest.mark.parametrize(
    ("family", "settings", "off"),
    [
        ("qwen3", {"kwargs": {"apply_rope_fusion": False}}, {"apply_rope_fusion"}),
        ("qwen3_moe", {"kwargs": {"moe_permute_fusion": False}}, {"moe_permute_fusion"}),
        ("qwen3_moe", {"kwargs": {"moe_router_fusion": False}}, {"moe_router_fusion"}),
        ("qwen3_moe", {"kwargs": {"bias_dropout_fusion": False}}, {"bias_dropout_fusion"}),
        ("qwen3_moe", {"moe_router_replay": True}, {"moe_router_fusion"}),
        ("qwen3_moe", {"moe_router_dtype": "fp64"}, {"moe_router_fusion"}),
    ],
)
def test_settings_turn_them_off(configs, family, settings, off):
    assert fused(configs[family]) - fused(configs[family], **settings) == off


def test_the_activation_is_fused_once(configs):
    of_megatron = (DENSE | {"bias_activation_fusion"}) - {"use_te_activation_func"}
    assert fused(configs["qwen3"], kwargs={"bias_activation_fusion": True}) == of_megatron
    assert fused(configs["qwen3"], kwargs={"use_te_activation_func": False}) == of_megatron
    of_te = (ROUTED | {"use_te_activation_func"}) - {"bias_activation_fusion"}
    assert fused(configs["qwen3_moe"], kwargs={"use_te_activation_func": True}) == of_te


def test_a_rotary_embedding_that_scales_packed_rows_is_not_fused(tmp_path):
    hf = AutoConfig.from_pretrained(write_family(tmp_path, "qwen3", rope_parameters=YARN))
    assert fused(hf) == DENSE - {"apply_rope_fusion"}
    with pytest.raises(ValueError, match="apply_rope_fusion: does not scale"):
        fused(hf, kwargs={"apply_rope_fusion": True})


def test_gradients_accumulate_in_products_if_the_extension_is_installed(configs, monkeypatch):
    monkeypatch.setattr(architecture, "has_gradient_accumulation", lambda: True)
    assert fused(configs["qwen3"]) == DENSE | {"gradient_accumulation_fusion"}
    assert fused(configs["qwen3"], kwargs={"gradient_accumulation_fusion": False}) == DENSE
