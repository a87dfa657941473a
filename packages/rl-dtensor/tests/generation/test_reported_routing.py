"""What the Hugging Face generator says of the experts it chose, and what a trainer makes of it."""

import asyncio

import numpy as np
import pytest

from rl_core.generation import GenerationRequest, Placement, SamplingParams
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.torch.routed_oracle import batch_of, routing_of
from rl_core.testing.torch.tiny_model import write_tiny_model
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.generation.generator import HFGenerator

FIELDS = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
REQUESTS = [
    GenerationRequest(
        np.random.default_rng(seed).integers(3, 100, length).astype(np.int32), SamplingParams(30 - length), seed
    )
    for seed, length in enumerate((1, 12, 9, 12, 9, 17, 20))
]


def completions_of(folder, precision):
    """Those of all requests: more than are decoded together, and of different lengths."""

    async def run():
        config = ModelConfig(model_name=str(folder), precision=precision, max_total_sequence_length=64)
        settings, placement = HFConfig(max_batch_size=4, max_prefill_tokens=24), Placement("cpu", reports_routing=True)
        generator = HFGenerator(GenerationConfig(backend="hf"), settings, config, placement)
        await generator.start()
        try:
            return await asyncio.gather(*[generator.generate(request) for request in REQUESTS])
        finally:
            await generator.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("routed"), "qwen3_moe", **FIELDS)


def test_completions_report_the_experts_that_transformers_sends_their_tokens_to(folder):
    completions = completions_of(folder, "float32")
    for request, completion in zip(REQUESTS, completions, strict=True):
        assert completion.routed_experts.dtype == np.int16
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        # the last token is sampled and never fed
        expected = routing_of(folder, tokens[:-1])
        np.testing.assert_array_equal(np.sort(completion.routed_experts, -1), expected)


def test_a_trainer_that_replays_a_generators_routing_agrees_with_it_more(ranks, folder):
    batch = batch_of(REQUESTS, completions_of(folder, "bfloat16"))
    generated = batch.ragged("generation_logprobs").values
    config = ModelConfig(model_name=str(folder), precision="float32")
    differences = []
    for replays in (True, False):
        with PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(), 1, moe_router_replay=replays) as model:
            found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        differences.append(np.abs(np.exp(found - generated) - 1)[~np.isnan(generated)])
    replayed, free = differences
    assert replayed.mean() < free.mean() / 1.5
    assert replayed.max() < free.max() / 1.5
