"""Plans name modules, and parameters that a block holds itself."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.plan import blocks_of, plan_of, whole_blocks_of

ATTENTION = "model.layers.*.self_attn"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
}


@pytest.fixture(scope="module")
def hf():
    config = AutoConfig.for_model("gpt_oss", **SIZES, num_local_experts=2, intermediate_size=16)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_sinks_are_split_with_the_heads_of_their_block(hf):
    plan = plan_of(hf, None, hf.model.layers)
    assert plan["model.layers.0.self_attn.sinks"] == "colwise"
    assert "model.layers.0.self_attn" in blocks_of(plan)


def test_a_parameter_can_be_split_by_heads_alone(hf):
    custom = {f"{ATTENTION}.q_proj": "colwise", f"{ATTENTION}.sinks": "rowwise"}
    with pytest.raises(ValueError, match=r"splits the parameter model.layers.\*.self_attn.sinks as 'rowwise'"):
        plan_of(hf, custom, hf.model.layers)


def test_a_name_that_the_model_lacks_is_refused(hf):
    with pytest.raises(ValueError, match=r"self_attn.bias., which is not a module or a parameter of Gpt"):
        plan_of(hf, {f"{ATTENTION}.q_proj": "colwise", f"{ATTENTION}.bias": "colwise"}, hf.model.layers)


def test_attention_that_no_plan_names_is_whole_on_every_rank(hf):
    plan = plan_of(hf, {"model.layers.*.mlp.experts": "experts", "lm_head": "colwise"}, hf.model.layers)
    assert plan["model.layers.0.self_attn"] == "whole"
    assert whole_blocks_of(plan) == {"model.layers.0.self_attn"}
    assert "model.layers.0.mlp" not in plan


def built(family, **fields):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **fields))


def test_a_family_without_a_plan_is_split_by_the_names_of_its_layers():
    hf = built("afmoe", num_experts=4, num_dense_layers=0, head_dim=8, layer_types=["full_attention"])
    plan = plan_of(hf, None, hf.model.layers)
    attention = "model.layers.0.self_attn"
    assert {plan[f"{attention}.{name}"] for name in ("q_proj", "k_proj", "v_proj", "gate_proj")} == {"colwise"}
    assert plan[f"{attention}.o_proj"] == "rowwise"
    assert plan[f"{attention}.q_norm"] == plan[f"{attention}.k_norm"] == "replicated"
    assert plan["model.layers.0.mlp.experts"] == "experts"


@pytest.mark.parametrize(
    "family",
    [
        "bitnet",  # a norm over all heads
        "diffllama",  # parameters of its own
        "persimmon",  # other names
    ],
)
def test_layers_of_which_names_do_not_tell_all_are_not_split(family):
    hf = built(family)
    with pytest.raises(ValueError, match=f"{family} models have no tensor-parallel plan.*custom_parallel_plan"):
        plan_of(hf, None, decoder_layers(hf))
