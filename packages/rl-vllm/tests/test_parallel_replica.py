"""A replica of several engines that share the experts of a mixture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import VOCAB_SIZE, ReferenceModel, write_reference_model
from rl_core.testing.weights import model_config, prompt
from rl_vllm import VllmConfig, VllmGenerator


@exhaustive
def test_two_engines_with_half_of_the_experts_each_compute_the_model(tmp_path: Path) -> None:
    write_reference_model(tmp_path, seed=0)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    reference = ReferenceModel(tmp_path)
    backend = VllmConfig(kv_cache_gib=0.25, data_parallel_size=2)
    generator = VllmGenerator(GenerationConfig(), backend, model_config(tmp_path), Placement("cpu"))
    requests = [GenerationRequest(prompt(5, seed), SamplingParams(8, temperature=0.0), 0) for seed in range(6)]

    async def check() -> None:
        await generator.start()
        try:
            # Two at a time are on both engines, and a single one on one engine, while the other takes part empty.
            for together in (requests, requests[:1]):
                for request, found in zip(
                    together, await asyncio.gather(*map(generator.generate, together)), strict=True
                ):
                    expected = reference.completion_logprobs(request.token_ids, found.token_ids)
                    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
            np.testing.assert_allclose(await generator.score(prompt(20)), reference.score(prompt(20)), atol=1e-4)
            await generator.pause()
            await generator.resume()
            assert (await generator.health())["num_requests"] == 0
        finally:
            await generator.close()

    asyncio.run(check())
