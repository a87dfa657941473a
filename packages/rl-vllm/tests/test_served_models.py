"""Models that vLLM by itself computes otherwise than transformers does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spoilable_generator import SpoilableGenerator
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
)

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, ReferenceModel, write_reference_model
from rl_core.testing.weights import model_config, prompt
from rl_vllm import VllmConfig

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "initializer_range": 0.2,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def cohere2() -> PreTrainedModel:
    """Its window of attention is the config's."""
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, **SLIDING))


def gemma3n() -> PreTrainedModel:
    """It has an embedding of tokens for each layer."""
    config = Gemma3nTextConfig(
        **SIZES,
        **SLIDING,
        head_dim=32,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        laurel_rank=8,
    )
    model = Gemma3nForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("correct_output_scale"):
            torch.nn.init.uniform_(parameter)
    return model


def lfm2() -> PreTrainedModel:
    """Its attention passes heads to rotary embeddings in a dimension of their own."""
    layers = ["conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=layers, conv_dim=128, block_dim=128))


def llama4() -> PreTrainedModel:
    """Its temperature of attention grows with the length of a row."""
    config = Llama4TextConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=4,
        intermediate_size_mlp=96,
        no_rope_layers=[1, 0],
        attention_chunk_size=128,
        floor_scale=4,
    )
    return Llama4ForCausalLM(config)


def minimax_m2() -> PreTrainedModel:
    """The load of its experts is corrected, and their scores are sigmoids."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "use_routing_bias": True}
    config = MiniMaxM2Config(**SIZES, head_dim=32, rotary_dim=32, **experts)
    model = MiniMaxM2ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_()
    return model


# what makes the others differ is held in test_rotary_embeddings, test_arguments and test_expert_routing too
@pytest.mark.parametrize("make", partly_exhaustive([cohere2, gemma3n, lfm2, llama4, minimax_m2], always=[gemma3n]))
def test_a_model_is_served_as_transformers_computes_it(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    folder = write_reference_model(tmp_path, seed=1)
    torch.manual_seed(1)
    make().save_pretrained(folder)
    expected = ReferenceModel(folder).score(prompt(40))
    backend = VllmConfig(kv_cache_gib=0.25)
    generator = SpoilableGenerator(GenerationConfig(), backend, model_config(folder), Placement("cpu"))

    async def score() -> np.ndarray:
        await generator.start()
        try:
            return await generator.score(prompt(40))
        finally:
            await generator.close()

    np.testing.assert_allclose(asyncio.run(score()), expected, atol=1e-4)
