"""Rows with images, and what `transformers` computes of them in float64."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.images import DIGEST_BYTES, IMAGES, STORE_VARIABLE, ImageStore
from rl_core.model import Read, read_columns
from rl_core.model_config import LoraConfig
from rl_core.selfcheck.rank_pool import Rank
from rl_core.selfcheck.torch.oracle import Oracle, adapt
from rl_core.testing.model_worker import make_candidates
from rl_core.testing.torch.tiny_vision import tiny_image, tiny_png

SIZES = ((56, 56), (100, 60), (56, 112))
"""Width and height of the images of the rows."""


def use_store(rank: Rank, folder: str) -> None:
    """Have this process read images from a folder."""
    os.environ[STORE_VARIABLE] = folder


class Rows:
    """Rows of a family: several images, none, and one in a later turn.

    Args:
        folder: Folder of the model.
        store: Store that the images are put into.
    """

    def __init__(self, folder: Path, store: ImageStore) -> None:
        self.images = [tiny_image(seed, *size) for seed, size in enumerate(SIZES)]
        self.digests = [store.put(tiny_png(seed, *size)).digest for seed, size in enumerate(SIZES)]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = _processor(folder, self.tokenizer)
        conversations: Sequence[Sequence[Sequence[Any]]] = (
            [("user", "look", 0, "and", 1), ("assistant", "both are red")],
            [("user", "no picture"), ("assistant", "indeed")],
            [("user", "wait"), ("assistant", "yes?"), ("user", 2, "now"), ("assistant", "blue")],
        )
        self.shown = [[part for turn in each for part in turn if isinstance(part, int)] for each in conversations]
        self.tokens = [self._tokens(turns, shown) for turns, shown in zip(conversations, self.shown, strict=True)]

    def batch(self, rows: Sequence[int] = (0, 1, 2), seed: int = 0) -> Batch:
        """Rows with the columns of `rl_core.selfcheck.losses.TokenLoss` and their images."""
        rng = np.random.default_rng(seed)
        tokens = Ragged.from_rows([self.tokens[row] for row in rows], dtype=np.int32)
        count = len(tokens.values)
        digests = [
            np.frombuffer(b"".join(bytes.fromhex(self.digests[each]) for each in self.shown[row]), np.uint8)
            for row in rows
        ]
        return Batch(
            {
                TOKENS: tokens,
                "loss_mask": tokens.like((rng.random(count) < 0.7).astype(np.int8)),
                "weights": tokens.like(rng.normal(size=count).astype(np.float32)),
                "candidates": tokens.like(make_candidates(rng, count, 256)),
                IMAGES: Ragged.from_rows(
                    [each.reshape(-1, DIGEST_BYTES) for each in digests], np.uint8, (DIGEST_BYTES,)
                ),
            }
        )

    def _tokens(self, turns: Sequence[Sequence[Any]], shown: Sequence[int]) -> list[int]:
        messages = [{"role": role, "content": [_part(each) for each in parts]} for role, *parts in turns]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        images = {"images": [self.images[each] for each in shown]} if shown else {}
        ids: list[int] = np.asarray(self.processor(text=[text], **images)["input_ids"])[0].tolist()
        return ids


class VisionOracle(Oracle):
    """A vision-language model in float64, each row with its images passed through `transformers` alone."""

    def __init__(self, folder: Path, store: ImageStore) -> None:
        hf = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.model = _Seeing(hf.eval())
        # Pixtral's processor joins patches before its image processor sees them.
        self._joined = {"patch_size": 28} if hf.config.model_type == "mistral3" else {}
        self.role = "policy"
        self.optimizer = None
        self._store = store
        self._processor = AutoImageProcessor.from_pretrained(folder)

    def show(self, digests: Sequence[str]) -> None:
        """Show the model these images with the next row."""
        images = [self._store.open(each) for each in digests]
        self.model.shown = dict(self._processor(images=images, return_tensors="pt", **self._joined)) if images else {}

    def _reads(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Mapping[str, Tensor]:
        names = (TOKENS, *read_columns(reads))
        parts = []
        for row, digests in enumerate(batch.ragged(IMAGES)):
            self.show([bytes(each).hex() for each in digests])
            columns = {name: torch.as_tensor(batch.ragged(name)[row]).long() for name in names}
            parts.append(self._row(columns, reads, temperature))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def adapt_parts(hf: Any, lora: LoraConfig, left_out: Sequence[str]) -> None:
    """Put adapters on a whole model, except on some of its parts."""
    held = {name: hf.get_submodule(name) for name in left_out}
    for name in left_out:
        hf.set_submodule(name, nn.Identity())
    adapt(hf, lora)
    for name, module in held.items():
        hf.set_submodule(name, module.requires_grad_(False))


class _Seeing(nn.Module):
    """Passes the images of the row at hand to a model that is called with token ids."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.shown: dict[str, Tensor] = {}

    def forward(self, input_ids: Tensor) -> Any:
        is_image = (input_ids == self.hf.config.image_token_id).int()
        kind, told = self.hf.config.model_type, {}
        if kind == "gemma3":
            told = {"token_type_ids": is_image}
        elif kind == "gemma4" or (kind.startswith(("qwen", "glm")) and self.shown):
            told = {"mm_token_type_ids": is_image}
        seen = {
            name: each.double() if each.is_floating_point() else each
            for name, each in self.shown.items()
            if name not in ("num_crops", "num_patches", "aspect_ratios", "num_soft_tokens_per_image")
        }
        return self.hf(input_ids=input_ids, use_cache=False, **seen, **told)


def _processor(folder: Path, tokenizer: Any) -> Any:
    if folder.name != "smolvlm":
        return AutoProcessor.from_pretrained(folder)
    # its own processor needs a package that only videos use
    from transformers import Idefics3Processor

    return Idefics3Processor(AutoImageProcessor.from_pretrained(folder), tokenizer, image_seq_len=4)


def _part(part: int | str) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
