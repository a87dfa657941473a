"""Code of model families is recognised by what it computes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.torch.kernels.norm import NormForm
from rl_dtensor.model.layers.formulas import (
    has_plain_gate,
    is_gated_mlp,
    is_packed_mlp,
    is_pre_norm_layer,
    norm_form,
    rotating_forward,
)
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.parallel.experts import expert_modules


def tiny(family, attention="eager", **fields):
    config = shrink(AutoConfig.for_model(family, **fields))
    with made_tiny(config.model_type), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def parts(model, ending):
    return [module for module in model.modules() if type(module).__name__.endswith(ending)]


@pytest.mark.parametrize(
    ("family", "offset", "rounds_first"),
    [
        ("llama", 0.0, True),
        ("qwen3", 0.0, True),
        ("olmo2", 0.0, False),
        ("gemma2", 1.0, False),
        ("gemma3n_text", 0.0, False),
    ],
)
def test_norms_are_told_apart(family, offset, rounds_first):
    found = {norm_form(module) for module in parts(tiny(family), "RMSNorm")} - {None}
    (form,) = found
    assert (form.offset, form.rounds_first) == (offset, rounds_first)


def test_other_norms_have_no_form():
    class DoubledRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.eps = 1e-5

        def forward(self, x):
            return 2 * NormForm(self.eps)(x, self.weight)

    class WrongRMSNorm(DoubledRMSNorm):
        def forward(self, x):
            return NormForm(2 * self.eps)(x, self.weight)

    class RightRMSNorm(DoubledRMSNorm):
        def forward(self, x):
            return NormForm(self.eps)(x, self.weight)

    assert norm_form(RightRMSNorm()) == NormForm(1e-5)
    assert norm_form(DoubledRMSNorm()) is None
    assert norm_form(WrongRMSNorm()) is None
    assert norm_form(torch.nn.LayerNorm(8)) is None


@pytest.mark.parametrize(
    ("family", "fields", "gated", "packed"),
    [
        ("llama", {}, True, False),
        ("llama", {"hidden_act": "gelu"}, False, False),
        ("phi3", {}, False, True),
        ("falcon_h1", {"mlp_multipliers": [0.5, 1.0]}, False, False),
        ("starcoder2", {}, False, False),
    ],
)
def test_mlps_are_told_apart(family, fields, gated, packed):
    mlps = parts(tiny(family, **fields), "MLP")
    assert mlps
    assert {is_gated_mlp(module) for module in mlps} == {gated}
    assert {is_packed_mlp(module) for module in mlps} == {packed}


@pytest.mark.parametrize(("family", "is_plain"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False)])
def test_gates_of_experts_are_told_apart(family, is_plain):
    assert {has_plain_gate(module) for module in expert_modules(tiny(family))} == {is_plain}


@pytest.mark.parametrize(
    ("family", "rotates"), [("llama", True), ("glm4_moe", True), ("glm", False), ("cohere", False), ("gpt2", False)]
)
def test_rotations_are_told_apart(family, rotates):
    found = [rotating_forward(module) for module in parts(tiny(family), "Attention")]
    assert {each is not None for each in found} == {rotates}


@pytest.mark.parametrize(
    ("family", "is_known"),
    [("llama", True), ("qwen3_moe", True), ("mixtral", True), ("granite", False), ("olmo2", False), ("gemma2", False)],
)
def test_layers_are_known_by_their_statements(family, is_known):
    kinds = {type(module) for module in parts(tiny(family), "DecoderLayer")}
    assert {is_pre_norm_layer(kind) for kind in kinds} == {is_known}
