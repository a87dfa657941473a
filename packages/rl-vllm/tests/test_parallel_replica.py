"""A replica of two ranks: engines that share the experts of a mixture, and pipeline ranks."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_speculation import write_mixture

from rl_core.errors import GeneratorError
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.testing.weights import SYNC_TIMEOUT_S, _address, model_config, prompt
from rl_core.weights import Transport
from rl_vllm import VllmConfig, VllmGenerator

NUM_TOKENS = 8
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0)


@exhaustive
@pytest.mark.parametrize(
    ("split", "family"),
    [("data_parallel_size", "deepseek_v3"), ("data_parallel_size", "glm4_moe"), ("pipeline_parallel_size", "qwen3")],
)
def test_two_ranks_compute_what_one_does(split: str, family: str, tmp_path: Path) -> None:
    """Also with requests in one engine only, while the other has none, and after weights were sent to both."""
    write: Any = write_reference_model if family == "qwen3" else partial(write_mixture, family=family)
    first, second = (write(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    backend = VllmConfig.model_validate({"kv_cache_gib": 0.25, split: 2})
    generator = VllmGenerator(GenerationConfig(), backend, model_config(first), Placement("cpu", awaits_weights=True))
    with asyncio.Runner() as runner:
        runner.run(_serve(generator, first, second))


async def _serve(generator: VllmGenerator, first: Path, second: Path) -> None:
    await generator.start()
    sender = SenderProcess()
    try:
        for version, folder in enumerate((first, second), 1):
            received = await _send(generator, sender, folder, version)
            # Both have all attention layers and half of the experts, or half of the layers.
            assert len(received) == 2
            assert len({digest.partition("-")[0] for digest in received}) == 2
            reference = ReferenceModel(folder)
            for prompts in ([prompt(9)], [prompt(length) for length in (5, 17, 30, 41, 3, 12, 8)]):
                requests = [GenerationRequest(tokens, GREEDY, seed) for seed, tokens in enumerate(prompts)]
                for request, found in zip(requests, await _answers(generator, requests), strict=True):
                    assert found.token_ids.tolist() == reference.greedy(request.token_ids, NUM_TOKENS)
                    expected = reference.completion_logprobs(request.token_ids, found.token_ids)
                    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
            np.testing.assert_allclose(await generator.score(prompt(20)), reference.score(prompt(20)), atol=1e-4)
        engine: Any = generator._running()
        engine._processes[-1].kill()
        with pytest.raises(GeneratorError, match="the engine's process died"):  # noqa: PT012
            async with asyncio.timeout(120):
                while True:
                    await _answers(generator, [GenerationRequest(prompt(5), GREEDY, 0)])
    finally:
        sender.close()
        await generator.close()


async def _answers(generator: VllmGenerator, requests: list[GenerationRequest]) -> list[Completion]:
    return await asyncio.gather(*map(generator.generate, requests))


async def _send(generator: VllmGenerator, sender: SenderProcess, folder: Path, version: int) -> list[str]:
    manifest = manifest_of(folder, version)
    transport = Transport("collective", _address(), 2, timeout_s=SYNC_TIMEOUT_S)
    await generator.pause()
    await generator.begin(manifest)
    sending = sender.send(folder, manifest, transport, Fault())
    received = list(await generator.receive(transport, 1))
    assert sorted(set(await asyncio.wrap_future(sending))) == sorted(set(received))
    await generator.commit(version)
    await generator.resume()
    return received
