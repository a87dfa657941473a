"""Images on their way into the engine, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor
from vllm.multimodal import MULTIMODAL_REGISTRY

from rl_core.errors import RequestRefused
from rl_core.images import STORE_VARIABLE, ImageRef, ImageStore
from rl_core.model_config import ModelConfig, VisionConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.torch.tiny_vision import tiny_png, write_tiny_vision_model
from rl_vllm import VllmConfig
from rl_vllm.engine import image_inputs
from rl_vllm.engine.arguments import engine_arguments, image_token_of
from rl_vllm.engine.image_inputs import IMAGE, ImageInputs, ProcessedImage, placed, trimmed

TOKEN = 9
ITEM: Any = None
WHOLE = ProcessedImage(ITEM, [TOKEN, TOKEN], None)
TILES = ProcessedImage(ITEM, [TOKEN, 7, TOKEN], torch.tensor([True, False, True]))


def test_images_are_placed_where_their_tokens_are() -> None:
    first, second = placed([1, TOKEN, TOKEN, 2, TOKEN, 7, TOKEN, 3], [WHOLE, TILES], TOKEN)
    assert (first.offset, first.length, first.is_embed) == (1, 2, None)
    assert (second.offset, second.length) == (4, 3)
    assert second.is_embed is not None
    assert second.is_embed.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("ids", "images", "reason"),
    [
        ([1, TOKEN, 2], [WHOLE], "image 0 has 1 tokens in the request, but vLLM's processor makes 2"),
        ([1, TOKEN, TOKEN, TOKEN], [WHOLE], "image 0 has 3 tokens in the request"),
        ([TOKEN, TOKEN, 5, TOKEN], [WHOLE], "those of more: token 3 is the id of image tokens"),
        ([1, 2], [WHOLE], "the tokens of image 0 are not among those"),
        ([TOKEN, 8, TOKEN], [TILES], "image processors differ"),
        ([1, TOKEN], [], "has 0 images"),
    ],
)
def test_tokens_of_other_images_are_refused(ids: list[int], images: list[ProcessedImage], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        placed(ids, images, TOKEN)


def test_tokens_around_an_image_may_have_merged_with_the_text() -> None:
    # those of Gemma 3 begin and end with line ends
    found = trimmed(ITEM, [4, 5, TOKEN, TOKEN, 6, 4], torch.tensor([False, False, True, True, False, False]))
    assert (found.token_ids, found.is_embed) == ([TOKEN, TOKEN], None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageRef:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    return ImageStore.of_run().put(tiny_png(0, 112, 140))


def inputs_of(folder: Path, **vision: Any) -> ImageInputs:
    model = ModelConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=256,
        vision=VisionConfig(enabled=True, **vision),
    )
    arguments = engine_arguments(
        VllmConfig(), model, Placement("cpu"), max_len=256, eager=True, extension="rl_vllm.engine_worker.EngineWorker"
    )
    processor = MULTIMODAL_REGISTRY.create_processor(arguments.create_model_config())
    renderer: Any = SimpleNamespace(get_mm_processor=lambda: processor)
    return ImageInputs(renderer, image_token=image_token_of(model), max_images=model.vision.max_images)


@pytest.mark.parametrize("limits", [{}, {"max_pixels": 6000}, {"min_pixels": 30000, "max_pixels": 40000}])
def test_limits_of_pixels_reach_the_engines_processor(folder: Path, image: ImageRef, limits: dict[str, int]) -> None:
    inputs = inputs_of(folder, **limits)
    own = AutoImageProcessor.from_pretrained(folder, backend="torchvision", **limits)
    expected = own(images=[ImageStore.of_run().open(image.digest)], return_tensors="pt")
    token = inputs._image_token
    ids = np.array([1, *[token] * int(expected["image_grid_thw"].prod() // 4), 2], np.int32)
    prompt = inputs.prompt(ids, [image.digest], None)
    pixels = prompt["mm_kwargs"][IMAGE][0].get_data()["pixel_values"]
    torch.testing.assert_close(pixels.float(), expected["pixel_values"], rtol=0, atol=1e-6)
    assert prompt["mm_hashes"] == {IMAGE: [image.digest]}


def test_processed_images_are_kept_within_a_limit(
    folder: Path, image: ImageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(folder)
    assert inputs._processed(image.digest) is inputs._processed(image.digest)
    monkeypatch.setattr(image_inputs, "CACHED_BYTES", 1)
    other = ImageStore.of_run().put(tiny_png(1))
    inputs._processed(other.digest)
    assert list(inputs._cache) == [other.digest]


def test_a_request_without_images_has_no_tokens_of_any(folder: Path) -> None:
    inputs = inputs_of(folder)
    inputs.require_text(np.array([1, 2], np.int32))
    with pytest.raises(RequestRefused, match=r"has 1 image tokens .* but no images"):
        inputs.require_text(np.array([1, inputs._image_token], np.int32))
