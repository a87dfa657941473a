"""Tiny random models for tests, in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rl_core.torch.files.language_part import language_names

Family = Literal["qwen3", "llama"]

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields of a model's config that make a model of its family tiny."""


VISION: dict[str, Any] = {
    "num_hidden_layers": 1,
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_heads": 4,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
"""Sizes of the part of a composite model that sees, by field name in any family."""


def write_tiny_model(
    folder: Path,
    family: str = "qwen3",
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **fields: Any,
) -> Path:
    """Write a random causal language model of about 20k parameters; `fields` replace fields of its config.

    The embedding is tied in `qwen3` and not in `llama`, unless `tie_word_embeddings` is set.
    """
    settings = {**SIZES, "tie_word_embeddings": family == "qwen3", **fields}
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_composite(folder: Path, kind: str, language: Path) -> Path:
    """Write a composite model of text and images (`gemma3`, `llama4`) whose language model is the one in a folder."""
    model = AutoModelForCausalLM.from_pretrained(language, dtype="auto")
    base = AutoConfig.for_model(kind)
    fields = base.to_dict()
    fields["text_config"] = model.config.to_dict()
    fields["tie_word_embeddings"] = model.config.tie_word_embeddings
    seen = fields["vision_config"] or {}
    fields["vision_config"] = seen and {**seen, **{name: size for name, size in VISION.items() if name in seen}}
    composite = AutoModelForImageTextToText.from_config(type(base).from_dict(fields), dtype=model.dtype)
    weights, within = model.state_dict(), composite.state_dict()
    names = language_names(within)
    assert names.keys() == weights.keys(), names.keys() ^ weights.keys()
    with torch.no_grad():
        for name, inner in names.items():
            within[inner].copy_(weights[name])
    composite.save_pretrained(folder)
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a model that `transformers` loads from a folder, in the dtype they have there, tied ones
    under every name."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
