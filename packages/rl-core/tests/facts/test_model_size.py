"""Sizes of models by their names. Sizes by config are compared with built models in the tests of rl-dtensor."""

import pytest

from rl_core.facts.model_size import ModelSize, size_of_fields, size_of_name, trained_size
from rl_core.model_config import ModelConfig


@pytest.mark.parametrize(
    ("name", "count", "experts"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 70e9, 0),
        ("Qwen/Qwen2.5-0.5B", 0.5e9, 0),
        ("/models/Qwen2.5-7B/", 7e9, 0),
        ("HuggingFaceTB/SmolLM2-135M", 135e6, 0),
        ("Qwen/Qwen3-30B-A3B", 30e9, 27e9),
        ("google/gemma-2-9b-it", 9e9, 0),
    ],
)
def test_a_name_states_a_size(name, count, experts):
    size = size_of_name(name)
    assert (size.count, size.experts) == (count, experts)


@pytest.mark.parametrize(
    "name", ["tiny-arithmetic-sft", "mistralai/Mixtral-8x7B", "google/gemma-3n-E4B", "my/4bit-model", "org/7B/model"]
)
def test_a_name_that_states_no_number_of_parameters_is_not_guessed(name):
    assert size_of_name(name) is None


@pytest.mark.parametrize(
    "fields", [{}, {"hidden_size": 8}, {"n_embd": 768, "n_layer": 12}, {"hidden_size": None, "vocab_size": "16"}]
)
def test_fields_that_do_not_determine_the_size_are_not_guessed(fields):
    assert size_of_fields(fields) is None


def test_one_end_of_the_model_is_on_the_largest_pipeline_stage():
    size = ModelSize(layers=80, embedding=5, head=5)
    assert [size.dense_of_rank(stages, 1) for stages in (1, 8)] == [90, 15]


def test_tensor_parallel_ranks_have_a_whole_vision_tower_which_only_the_first_stage_has():
    size = ModelSize(layers=80, embedding=5, head=30, vision=20)
    assert [size.dense_of_rank(stages, 2) for stages in (1, 8)] == [40 + 37.5, 5 + 22.5]


FIELDS = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
}
ATTENTION, MLP, END = 3 * 8 * 8, 3 * 8 * 16, 32 * 8


@pytest.mark.parametrize(
    ("patterns", "layers", "embedding", "head"),
    [
        ({}, 3 * (ATTENTION + MLP), END, END),
        ({"freeze": ["model.embed_tokens", "*.mlp"]}, 3 * ATTENTION, 0, END),
        ({"train_only": ["model.layers.2", "*norm*"]}, ATTENTION + MLP, 0, 0),
        ({"train_only": ["*norm*"]}, 0, 0, 0),
        # The names of another model are not known here, so everything is counted.
        ({"freeze": ["model.vision_tower"]}, 3 * (ATTENTION + MLP), END, END),
    ],
)
def test_what_trains_is_counted_by_patterns(patterns, layers, embedding, head):
    model = ModelConfig(model_name="model", **patterns)
    found = trained_size(model, FIELDS, size_of_fields(FIELDS))
    assert found == ModelSize(layers, embedding=embedding, head=head)


def test_a_size_from_a_name_trains_as_a_whole():
    size = size_of_name("org/model-7B")
    assert trained_size(ModelConfig(model_name="org/model-7B", freeze=["*.mlp"]), {}, size) == size
