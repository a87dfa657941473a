"""Models that are served with images: their logprobs are those of transformers, and their weights can be replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from image_bench import VisionModel, completed, put_images, sync, vision_generator
from spoilable_generator import SpoilableGenerator

from rl_core.devices import device_named
from rl_core.errors import RequestRefused, WeightSyncError
from rl_core.images import STORE_VARIABLE, ImageRef
from rl_core.model_config import ModelConfig
from rl_core.rollouts.rollout import Completion
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.torch.weight_sender import SenderProcess
from rl_vllm import VllmConfig
from rl_vllm import generator as generator_module
from rl_vllm.config import QuantizationConfig
from rl_vllm.plugin import IMAGE_FAMILIES, image_problem

TOLERANCE = 1e-4

PROJECTORS = {
    "gemma3": "multi_modal_projector",
    "idefics3": "connector",
    "internvl": "multi_modal_projector",
    "qwen2_5_vl": "visual.merger",
    "qwen3_vl": "visual.merger",
    "smolvlm": "connector",
}
"""Part of the names of a projector's weights."""


@dataclass
class Bench:
    """An engine that serves a model with images, and another model whose weights it may get."""

    runner: asyncio.Runner
    generator: SpoilableGenerator
    first: VisionModel
    second: VisionModel
    images: Sequence[ImageRef]
    sender: SenderProcess
    shared: Path
    version: int = 0

    def complete(self, tokens: np.ndarray, images: Sequence[ImageRef], seed: int = 0) -> Completion:
        return self.runner.run(completed(self.generator, tokens, images, seed=seed))

    def check(self, model: VisionModel, tokens: np.ndarray, images: Sequence[ImageRef], seed: int = 0) -> np.ndarray:
        """Compare a completion with the model; returns all its tokens."""
        found = self.complete(tokens, images, seed)
        whole = np.concatenate([tokens, found.token_ids])
        expected = model.logprobs(whole, images)[len(tokens) - 1 :]
        np.testing.assert_allclose(found.logprobs, expected, atol=TOLERANCE)
        return whole

    def sync(self, folder: Path, spoiled: str = "") -> None:
        self.version += 1
        self.runner.run(sync(self.generator, self.sender, folder, self.shared, self.version, spoiled))


@pytest.fixture(scope="module", params=partly_exhaustive(IMAGE_FAMILIES, always=["qwen2_5_vl"]))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv(STORE_VARIABLE, str(folder / "images"))
        # of Gemma 3 all but the attention within an image is compared
        patch.setattr(generator_module, "image_problem", lambda *_: "")
        first, second = (VisionModel(folder / f"model{seed}", request.param, seed) for seed in (1, 2))
        generator = vision_generator(first.folder)
        sender = SenderProcess()
        try:
            runner.run(generator.start())
            yield Bench(runner, generator, first, second, put_images(), sender, folder / "weights")
        finally:
            runner.run(generator.close())
            sender.close()


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_sampled_logprobs_are_those_of_transformers(bench: Bench, num_images: int) -> None:
    shown = bench.images[:num_images]
    bench.check(bench.first, bench.first.encoded(["Look at ", *shown, " now."]), shown)


def test_a_later_turn_brings_another_image(bench: Bench) -> None:
    first, second, third = bench.images
    so_far = bench.check(bench.first, bench.first.encoded([first, "and", second]), [first, second])
    tokens = np.concatenate([so_far, bench.first.encoded(["What about ", third, first])])
    bench.check(bench.first, tokens, [first, second, third, first], seed=1)


def test_an_update_takes_effect_in_all_parts(bench: Bench) -> None:
    shown = bench.images[:2]
    tokens = bench.first.encoded([*shown, "?"])
    before = bench.complete(tokens, shown)
    try:
        bench.sync(bench.second.folder)
        bench.check(bench.second, tokens, shown)
    finally:
        bench.sync(bench.first.folder)
    again = bench.complete(tokens, shown)
    np.testing.assert_array_equal(again.token_ids, before.token_ids)
    np.testing.assert_array_equal(again.logprobs, before.logprobs)


def test_a_projector_that_was_changed_after_it_arrived_is_named(bench: Bench) -> None:
    part = PROJECTORS[bench.first.config.model_type]
    try:
        with pytest.raises(WeightSyncError, match="does not compute with") as caught:
            bench.sync(bench.second.folder, spoiled=part)
        assert all(part in name for name in caught.value.tensors)
    finally:
        bench.sync(bench.first.folder)


def test_a_request_whose_images_and_tokens_differ_is_refused_by_name(bench: Bench) -> None:
    shown = bench.images[:2]
    tokens = bench.first.encoded([*shown, "?"])
    token = bench.first.config.image_token_id
    is_image = tokens == token
    shorter = np.delete(tokens, np.flatnonzero(is_image)[0])
    missing = [*shown, ImageRef("0" * 32, 1, 1)]
    for given, images, reason in [
        (shorter, shown, "trainer's and the engine's image processors differ"),
        (np.insert(tokens, np.flatnonzero(is_image)[0], token), shown, "image processors differ|those of more"),
        (tokens, shown[:1], "its tokens have those of more"),
        (tokens, bench.images, "image 2 are not among those of the request"),
        (tokens, [], "image tokens .* but no images"),
        (tokens, missing[1:], "is not in"),
        (tokens, [*shown, *bench.images], "policy.vision.max_images allows 4"),
    ]:
        with pytest.raises(RequestRefused, match=reason):
            bench.complete(given, images)
    bench.check(bench.first, tokens, shown)


@pytest.mark.parametrize("problem", ["family", "attention on cpu", "8 bits", "none"])
def test_what_is_not_exact_is_refused_by_name(problem: str, tmp_path: Path) -> None:
    family, device, reason = {
        "family": ("llava", "cuda", "models of the type llava"),
        "attention on cpu": ("gemma3", "cpu", "in both directions"),
        "8 bits": ("qwen3_vl", "cuda", "generation.vllm_cfg.quantization"),
        "none": ("gemma3", "cuda", ""),
    }[problem]
    config = VllmConfig(quantization=QuantizationConfig(method="fp8_per_channel") if problem == "8 bits" else None)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}", "image_token_id": 5}}')
    found = image_problem(config, ModelConfig(model_name=str(tmp_path)), device_named(device))
    assert bool(found) == bool(reason)
    assert reason in found


@exhaustive
def test_an_engine_in_its_own_process_serves_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "images"))
    images = put_images()
    model = VisionModel(tmp_path / "model", "qwen2_5_vl", 1)
    tokens = model.encoded(["See ", images[0]])
    generator = vision_generator(model.folder, own_process=True)

    async def run() -> Completion:
        await generator.start()
        try:
            return await completed(generator, tokens, images[:1])
        finally:
            await generator.close()

    found = asyncio.run(run())
    whole = np.concatenate([tokens, found.token_ids])
    np.testing.assert_allclose(found.logprobs, model.logprobs(whole, images[:1])[len(tokens) - 1 :], atol=TOLERANCE)
