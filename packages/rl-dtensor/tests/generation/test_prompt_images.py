"""Completions of prompts with images, whose logprobs are those of transformers in float64."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_core.errors import RequestRefused
from rl_core.images import STORE_VARIABLE, ImageStore
from rl_core.model_config import GenerationConfig, ModelConfig, VisionConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.interruption import request_for_rest
from rl_core.rollouts.rollout import Completion, WeightSpan
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model
from rl_core.testing.torch.vision_rows import Rows, VisionOracle
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.torch.generation.row import Row
from rl_core.weights import Transport
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.model.settings import FAMILIES


@dataclass
class Bench:
    """A generator of a family, rows with images, and what transformers computes of them."""

    runner: asyncio.Runner
    generator: HFGenerator
    folder: Path
    store: ImageStore
    rows: Rows
    oracle: VisionOracle

    def request(self, row: int, *, max_new_tokens: int = 8) -> GenerationRequest:
        digests = tuple(self.rows.digests[each] for each in self.rows.shown[row])
        tokens = np.array(self.rows.tokens[row], np.int32)
        return GenerationRequest(tokens, SamplingParams(max_new_tokens, temperature=0), row, images=digests)

    def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.generator.generate(request) for request in requests))

        return self.runner.run(together())

    def logprobs(self, request: GenerationRequest, sampled: np.ndarray) -> np.ndarray:
        """Logprobs of sampled tokens in one pass over the row."""
        self.oracle.show(request.images)
        row = torch.from_numpy(np.concatenate([request.token_ids, sampled]).astype(np.int64))[None]
        with torch.no_grad():
            scores = self.oracle.model(row).logits.log_softmax(-1)[0, :-1]
        return scores.gather(1, row[0, 1:, None])[:, 0].numpy()[len(request.token_ids) - 1 :]


DECODED = [family for family in FAMILIES if family != "llama4"]
"""Families that are decoded with a cache."""


@pytest.fixture(scope="module", params=partly_exhaustive(DECODED, always=["qwen2_5_vl", "qwen3_vl", "gemma3"]))
def bench(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("prompts") / request.param
    # The first model of GLM samples a token of images.
    write_tiny_vision_model(folder, request.param, seed=2 if request.param.startswith("glm") else 0)
    store = ImageStore(folder / "images")
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=256,
        vision=VisionConfig(enabled=True, max_images=2),
    )
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv(STORE_VARIABLE, str(folder / "images"))
        generator = HFGenerator(GenerationConfig(), HFConfig(), config, Placement("cpu"))
        runner.run(generator.start())
        yield Bench(runner, generator, folder, store, Rows(folder, store), VisionOracle(folder, store))
        runner.run(generator.close())


def test_rows_with_images_and_without_are_decoded_together(bench):
    requests = [bench.request(row) for row in range(3)]
    for request, found in zip(requests, bench.complete(requests), strict=True):
        np.testing.assert_allclose(found.logprobs, bench.logprobs(request, found.token_ids), atol=1e-4)


def test_a_row_that_joins_others_has_its_own_places(bench):
    requests = [bench.request(0), bench.request(2)]

    def joining() -> list[Completion]:
        decoder, rows = bench.generator._engine.model, [Row(request, 8, None) for request in requests]
        for row in rows:
            decoder.admit(deque([row]), 0)
            decoder.step(0)
        while decoder.rows:
            decoder.step(0)
        return [row.future.result(0) for row in rows]

    for request, found in zip(requests, bench.generator._engine.call(joining).result(), strict=True):
        np.testing.assert_allclose(found.logprobs, bench.logprobs(request, found.token_ids), atol=1e-4)


def test_an_interrupted_completion_continues_after_its_images(bench):
    request = bench.request(2, max_new_tokens=12)
    [whole] = bench.complete([request])
    kept = {"token_ids": whole.token_ids[:5], "logprobs": whole.logprobs[:5], "spans": (WeightSpan(0, 5),)}
    part = replace(whole, stop_reason="abort", **kept)
    [rest] = bench.complete([request_for_rest(request, [part])])
    assert rest.token_ids.tolist() == whole.token_ids[5:].tolist()
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[5:], atol=1e-4)


def test_a_prompt_whose_images_do_not_fit_fails_alone(bench):
    good, unknown = bench.request(0), bench.request(2)
    unknown = GenerationRequest(unknown.token_ids, unknown.sampling, 0, images=("0" * 32,))
    textual = GenerationRequest(good.token_ids, good.sampling, 0)

    async def together() -> list[Completion | BaseException]:
        tasks = (bench.generator.generate(each) for each in (good, unknown, textual))
        return await asyncio.gather(*tasks, return_exceptions=True)

    found, missing, without = bench.runner.run(together())
    assert isinstance(found, Completion)
    assert isinstance(missing, RequestRefused)
    assert "0" * 32 in str(missing)
    assert isinstance(without, RequestRefused)
    assert "image tokens" in str(without)


def test_the_weights_of_all_parts_are_replaced(bench, tmp_path):
    folder = write_tiny_vision_model(tmp_path / bench.folder.name, bench.folder.name, seed=1)
    request, (before,) = bench.request(0), bench.complete([bench.request(0)])
    manifest = manifest_of(folder, 1)
    transport = Transport("disk", str(tmp_path / "weights"), 1, 64 * 1024, 60.0)

    async def sync() -> None:
        await bench.generator.pause()
        await bench.generator.begin(manifest)
        sending = sender.send(folder, manifest, transport, Fault())
        await bench.generator.receive(transport, 1)
        await asyncio.wrap_future(sending)
        await bench.generator.commit(1)
        await bench.generator.resume()

    sender = SenderProcess()
    try:
        bench.runner.run(sync())
    finally:
        sender.close()
    bench.oracle = VisionOracle(folder, bench.store)
    (found,) = bench.complete([request])
    np.testing.assert_allclose(found.logprobs, bench.logprobs(request, found.token_ids), atol=1e-4)
    assert found.token_ids.tolist() != before.token_ids.tolist()
