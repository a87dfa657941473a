"""Tiny vision-language models served with images, and transformers as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spoilable_generator import SpoilableGenerator
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rl_core.images import ImageRef, ImageStore
from rl_core.model_config import GenerationConfig, ModelConfig, VisionConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.testing.torch.tiny_vision import tiny_png, write_tiny_vision_model
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.weights import Transport
from rl_vllm import VllmConfig
from rl_vllm.patches.numbers_of_videos import spell_no_numbers

spell_no_numbers()

COLUMNS_OF_IDS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}

SIZES = ((56, 84), (84, 56), (112, 84))
"""Width and height of the images of tests."""


class VisionModel:
    """A tiny model of a family in a folder, as transformers computes it.

    Args:
        folder: Folder of its files; made.
        family: Its `model_type`.
        seed: Seed of its weights.
    """

    def __init__(self, folder: Path, family: str, seed: int = 0) -> None:
        # vLLM's Qwen2, the language model of InternVL, has heads as wide as they can be, and on CPU none of 16
        heads = {"num_attention_heads": 2} if family == "internvl" else {}
        self.folder = write_tiny_vision_model(folder, family, seed=seed, **heads)
        self.config = AutoConfig.from_pretrained(folder)
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def encoded(self, content: Sequence[str | ImageRef]) -> np.ndarray:
        """int32 `[tokens]` of a message of the user, with all tokens of its images."""
        parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in content]
        messages = [{"role": "user", "content": parts}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        shown = [ImageStore.of_run().open(each.digest) for each in content if isinstance(each, ImageRef)]
        return np.asarray(self.processor(text=text, images=shown or None)["input_ids"][0], dtype=np.int32)

    def logprobs(self, token_ids: np.ndarray, images: Sequence[ImageRef]) -> np.ndarray:
        """float32 `[tokens - 1]`, logprobs of all tokens but the first."""
        columns: dict[str, Any] = {}
        if images:
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}] * len(images)}], tokenize=False
            )
            shown = [ImageStore.of_run().open(each.digest) for each in images]
            made = self.processor(text=text, images=shown, return_tensors="pt")
            columns = {name: value for name, value in made.items() if name not in COLUMNS_OF_IDS}
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        if self.config.model_type in ("qwen2_5_vl", "qwen3_vl"):
            columns["mm_token_type_ids"] = (ids == self.config.image_token_id).long()
        elif self.config.model_type == "gemma3":
            # vLLM's attention on CPU is causal within images, too
            columns["token_type_ids"] = torch.zeros_like(ids)
        with torch.no_grad():
            scores = self.model(input_ids=ids, **columns).logits.log_softmax(-1)[0, :-1]
        return scores.gather(1, ids[0, 1:, None])[:, 0].numpy()


def put_images() -> list[ImageRef]:
    """Images of all `SIZES` in the store of the run."""
    store = ImageStore.of_run()
    return [store.put(tiny_png(seed, width, height)) for seed, (width, height) in enumerate(SIZES)]


def vision_generator(folder: Path, *, own_process: bool | None = None) -> SpoilableGenerator:
    """A generator that serves the model in a folder with images, in float32 on one CPU rank."""
    model = ModelConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=512,
        vision=VisionConfig(enabled=True, max_images=4),
    )
    backend = VllmConfig(kv_cache_gib=0.25, own_process=own_process)
    return SpoilableGenerator(GenerationConfig(), backend, model, Placement("cpu"))


async def completed(
    generator: SpoilableGenerator, token_ids: np.ndarray, images: Sequence[ImageRef], *, seed: int = 0
) -> Completion:
    """A completion of eight tokens."""
    digests = tuple(image.digest for image in images)
    return await generator.generate(GenerationRequest(token_ids, SamplingParams(8), seed, images=digests))


async def sync(
    generator: SpoilableGenerator, sender: SenderProcess, folder: Path, shared: Path, version: int, spoiled: str = ""
) -> None:
    """Bring the generator to the weights of a folder, in rl-launch's order of calls.

    Args:
        generator: The generator.
        sender: Sends the weights.
        folder: Folder of a model.
        shared: Folder for the transfer.
        version: Version of the weights.
        spoiled: Part of the names of layers, the first of which changes after it arrived; none if empty.
    """
    manifest = manifest_of(folder, version)
    transport = Transport("disk", str(shared), generator.num_ranks, 64 * 1024, 60.0)
    await generator.pause()
    try:
        await generator.begin(manifest)
        sending = sender.send(folder, manifest, transport, Fault())
        await generator.receive(transport, 1)
        await asyncio.wrap_future(sending)
        if spoiled:
            await generator.spoil("change_layer", spoiled)
        await generator.commit(version)
    finally:
        await generator.resume()
