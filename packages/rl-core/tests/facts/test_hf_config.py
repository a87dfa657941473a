"""Configs of models on the hub, as far as their fields matter here. A case is a line."""

import pytest

from rl_core.facts.hf_config import (
    custom_code,
    num_positions,
    rope_parameters,
    switches_at,
    unread_quantisation,
    with_overrides,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        pytest.param({"max_position_embeddings": 4096}, 4096, id="as stated"),
        pytest.param({"n_positions": 1024}, 1024, id="GPT-2"),
        pytest.param(
            {"max_position_embeddings": 32768, "rope_scaling": YARN},
            131072,
            id="YaRN beyond what is stated [NovaSky-AI/SkyRL#561]",
        ),
        pytest.param(
            {"max_position_embeddings": 131072, "rope_parameters": YARN},
            131072,
            id="YaRN as stated [vllm-project/vllm#53634]",
        ),
        pytest.param(
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192, id="linear"
        ),
        pytest.param(
            {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            131072,
            id="Llama 3.1 states the scaled length",
        ),
        pytest.param(
            {"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope"}}, 131072, id="LongRoPE likewise"
        ),
        pytest.param(
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            65536,
            id="by kind of layer",
        ),
        pytest.param(
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            4096,
            id="dynamic, whose frequencies depend on the length beyond",
        ),
        pytest.param({"max_position_embeddings": 2048, "alibi": True}, None, id="ALiBi has no limit"),
        pytest.param({"max_position_embeddings": 2048, "position_embedding_type": "nope"}, None, id="no positions"),
        pytest.param(
            {"model_type": "bloom", "seq_length": 2048},
            None,
            id="BLOOM does not say that it has ALiBi [Muennighoff/sgpt#43]",
        ),
        pytest.param(
            {"max_seq_len": 2048, "attn_config": {"alibi": True}},
            None,
            id="MPT says it within a section [mosaicml/llm-foundry#365]",
        ),
        pytest.param({"hidden_size": 8}, None, id="nothing stated"),
    ],
)
def test_the_longest_row_that_a_model_has_positions_for(fields, positions):
    assert num_positions(fields) == positions


@pytest.mark.parametrize(
    ("fields", "overrides", "rope"),
    [
        pytest.param(
            {"rope_theta": 1e6},
            {"rope_type": "yarn", "factor": 2.0},
            {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0},
            id="theta of an older config is kept",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_type": "yarn"},
            {"rope_theta": 1e6, "rope_type": "yarn"},
            id="theta of a newer config is kept",
        ),
        pytest.param(
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"factor": 4.0},
            {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
            id="one parameter alone",
        ),
        pytest.param(
            {"rope_parameters": {"full": {"rope_theta": 1e6, "rope_type": "default"}, "sliding": {"rope_theta": 1e4}}},
            {"full": {"rope_type": "yarn"}},
            {"full": {"rope_theta": 1e6, "rope_type": "yarn"}, "sliding": {"rope_theta": 1e4}},
            id="by kind of layer",
        ),
    ],
)
def test_parameters_of_rotary_embeddings_are_merged_over_the_models_own(fields, overrides, rope):
    merged = with_overrides(fields, {"rope_parameters": overrides, "hidden_size": 8})
    assert (merged["rope_parameters"], merged["hidden_size"]) == (rope, 8)
    assert rope_parameters(merged) == rope


@pytest.mark.parametrize(
    ("quantised", "method"),
    [
        pytest.param(None, "", id="not quantised"),
        pytest.param({"quant_method": "mxfp4"}, "", id="MXFP4 is read"),
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, "", id="FP8 of blocks is read"),
        pytest.param({"quant_method": "fp8"}, "fp8 without block scales", id="FP8 of whole tensors"),
        pytest.param({"quant_method": "gptq", "bits": 4}, "gptq", id="GPTQ [unslothai/unsloth#2057]"),
        pytest.param({"quant_method": "awq"}, "awq", id="AWQ [unslothai/unsloth#2057]"),
        pytest.param({"load_in_4bit": True}, "bitsandbytes", id="bitsandbytes of old"),
        pytest.param(
            {"quant_method": "compressed-tensors"},
            "compressed-tensors",
            id="compressed tensors [ml-explore/mlx-lm#1865]",
        ),
        pytest.param({"bits": 4}, "unknown", id="nobody says how"),
    ],
)
def test_a_quantisation_that_is_not_read_is_named(quantised, method):
    assert unread_quantisation({"quantization_config": quantised}) == method


@pytest.mark.parametrize(
    ("auto_map", "written"),
    [
        (None, ""),
        ({"AutoConfig": "c.Config"}, "c.Config"),
        pytest.param(
            {"AutoConfig": "c.Config", "AutoModelForCausalLM": "m.Model"},
            "m.Model",
            id="of the model [huggingface/trl#5802]",
        ),
    ],
)
def test_code_of_a_models_own_is_named(auto_map, written):
    assert custom_code({"auto_map": auto_map}) == written


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        pytest.param(
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
            4096,
            id="Phi-3.5 [lablup/mlxcel#1358]",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096, id="newer"
        ),
        pytest.param({"rope_scaling": YARN}, None, id="YaRN"),
        pytest.param({}, None, id="plain"),
    ],
)
def test_the_length_at_which_longrope_switches(fields, length):
    assert switches_at(fields) == length
