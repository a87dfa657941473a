"""Activations of layers are counted without data."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import activations_of
from rl_dtensor.model.whole import decoder_layers

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}
BF16 = 2


def on_meta(family, **fields):
    config = AutoConfig.for_model(family, **{**SIZES, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ROWS)


def counted(hf, **split):
    return activations_of(hf, decoder_layers(hf), **{"tensor_ranks": 1, "splits_tokens": False, **split})


def test_activations_of_a_layer_are_counted_without_data():
    first, second = counted(on_meta("llama"))
    assert first == second
    hidden, inner, heads, groups = 32, 48, 32, 16
    assert first.full == hidden * BF16
    # queries, keys, values, attention, its projection, gate, up and down
    products = (heads + 2 * groups + heads + hidden + 2 * inner + hidden) * BF16
    assert first.selective == first.full + products
    assert first.none > first.selective
    halved = counted(on_meta("llama"), tensor_ranks=2, splits_tokens=True)[0]
    # The inputs of both blocks are gathered, and stay whole.
    assert halved.none == pytest.approx(first.none / 2 + 2 * hidden * BF16 / 2, abs=2)


def test_experts_keep_activations_of_each_token_that_they_get():
    fields = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 8, "moe_intermediate_size": 16}
    few, many = (counted(on_meta("qwen3_moe", num_experts_per_tok=k, **fields))[0] for k in (2, 4))
    assert many.none - few.none >= 2 * (32 + 3 * 16) * BF16
    assert many.full == few.full
