"""Tokenizers of tiny vision-language models, with the processors of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from rl_algos.tokenizer import load_tokenizer
from rl_core.images import ImageRef, image_refs
from rl_core.model_config import TokenizerConfig, VisionConfig
from rl_core.testing.torch.tiny_vision import FAMILIES, tiny_image, write_tiny_vision_model

NAMES = tuple(FAMILIES)
ENABLED = VisionConfig(enabled=True)


@dataclass(frozen=True)
class Family:
    """A family with both of its ways to read images."""

    name: str
    folder: Path
    tokenizer: Any
    processor: Any
    text_tokenizer: Any

    def expected(self, messages: Any, **options: Any) -> list[int]:
        """Tokens as the processor of transformers makes them, of messages with images of the size of their parts."""
        shown = [{**message, "content": _with_pixels(message["content"])} for message in messages]
        found = self.processor.apply_chat_template(shown, tokenize=True, return_dict=True, **options)
        ids = found["input_ids"][0]
        return list(getattr(ids, "tolist", lambda: ids)())


@cache
def family(name: str) -> Family:
    folder = write_tiny_vision_model(Path(mkdtemp()) / name, name)
    # the package that spells numbers is for videos only
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    tokenizer = load_tokenizer(TokenizerConfig(), str(folder), ENABLED)
    text_tokenizer = load_tokenizer(TokenizerConfig(), str(folder))
    return Family(name, folder, tokenizer, AutoProcessor.from_pretrained(folder), text_tokenizer)


def image(width: int, height: int, number: int = 0) -> dict[str, Any]:
    """A part of a message that is an image, of which only the size is known."""
    return dict(ImageRef(f"{number:032x}", width, height).part())


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def num_images(messages: Any) -> int:
    return len(list(image_refs(messages)))


def _with_pixels(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image", "image": tiny_image(0, part["width"], part["height"])} if part["type"] == "image" else part
        for part in content
    ]
