"""Which layers a model is built of, and what they are aligned to."""

import pytest
from layouts import write_family

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"transformer_engine": True}, "transformer_engine=true, but it is not installed"),
        ("qwen3_moe", {"moe_token_dispatcher_type": "flex"}, "needs DeepEP on CUDA"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_by_name(ranks, tmp_path, family, settings, message):
    config = ModelConfig(model_name=str(write_family(tmp_path, family)), precision="float32")
    with pytest.raises(WorkerError, match=message):
        PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 1, **settings)


@pytest.mark.parametrize(("recipe", "multiple"), [("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32), (None, 1)])
def test_tokens_are_aligned_to_the_recipe_of_8_bit_products(ranks, recipe, multiple):
    assert ranks.run("megatron_factories:multiple_of", [(recipe,)]) == [multiple]


@pytest.mark.parametrize(("window", "context_size", "expected"), [(6, 2, 4), (6, 1, 0), (None, 2, 0)])
def test_a_sliding_window_over_ranks_is_this_package_own_attention_beside_transformer_engine(
    ranks, window, context_size, expected
):
    assert ranks.run("megatron_factories:count_row_attention", [(window, context_size)]) == [expected]


def test_8_bit_copies_leave_the_device_with_the_parameters(ranks, tmp_path):
    config = ModelConfig(model_name=str(write_family(tmp_path, "llama")), precision="float32")
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 1) as model:
        assert ranks.run("megatron_factories:count_8_bit_copies", [()]) == [1]
        model.offload(("optimizer",))
        assert ranks.run("megatron_factories:count_8_bit_copies", [(False,)]) == [1]
        model.offload(("parameters",))
        assert ranks.run("megatron_factories:count_8_bit_copies", [(False,)]) == [0]
